"""`tok batch`: answer a file of requests without a server."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

from tok_core import AsyncEngine
from tok_server.batch import InvalidInput, OfflineBatch, Totals, show_progress
from tok_server.flags import engine_config, formats_of, model_and_name
from tok_server.settings import Formats

MAX_SHOWN_LINES = 10  # bad input lines that are printed


def main(options: argparse.Namespace) -> int:
    """Run the command. Returns the exit code. Errors: InvalidField, TokError."""
    config, (_, name) = engine_config(options), model_and_name(options.model)
    formats = formats_of(options)
    batch = OfflineBatch(Path(options.file), Path(options.output), name, retry_failed=options.retry_failed)
    began = time.monotonic()
    try:
        with batch:
            totals = asyncio.run(_answer(batch, AsyncEngine(config), formats))
    except InvalidInput as error:
        print(_error_report(error, options.file), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted; run the same command again to resume ({batch.partial})", file=sys.stderr)
        return 130
    print(_summary(totals, time.monotonic() - began, options.output), file=sys.stderr)
    return 1 if totals.failed else 0


async def _answer(batch: OfflineBatch, engine: AsyncEngine, formats: Formats) -> Totals:
    await batch.check()
    try:
        await engine.start()
        with show_progress(batch, engine):
            return await batch.answer(engine, formats)
    finally:
        await engine.close()


def _error_report(error: InvalidInput, file: str) -> str:
    if error.errors[0].line is None:  # about the file as a whole
        return f"tok batch: error: {file}: {error.errors[0].message}"
    lines = [
        f"tok batch: error: {file}: {len(error.errors)}{'+' if error.truncated else ''} bad lines; nothing was run"
    ]
    lines += [f"  line {one.line}: {one.message}" for one in error.errors[:MAX_SHOWN_LINES]]
    return "\n".join([*lines, *(["  …"] if len(error.errors) > MAX_SHOWN_LINES else [])])


def _summary(totals: Totals, seconds: float, output: str) -> str:
    lines = totals.completed + totals.failed
    return (
        f"{lines:,} lines written to {output}: {totals.completed:,} answered, {totals.failed:,} failed; "
        f"{totals.input_tokens:,} tokens of prompts, {totals.output_tokens:,} of answers; {seconds:,.1f} s"
    )

"""`tok batch`: answer a file of requests without a server."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

from tok_core import AsyncEngine
from tok_server.batch import BadInput, Offline, Totals, showing
from tok_server.flags import engine_config, model_and_name
from tok_server.settings import Formats

SHOWN = 10  # bad input lines that are printed


def main(options: argparse.Namespace) -> int:
    """Run the command. Returns the exit code. Errors: InvalidField, TokError."""
    config, (_, name) = engine_config(options), model_and_name(options.model)
    formats = Formats(options.tool_call_parser, options.reasoning_parser)
    work = Offline(Path(options.file), Path(options.output), name, retry_failed=options.retry_failed)
    began = time.monotonic()
    try:
        with work:
            totals = asyncio.run(_answer(work, AsyncEngine(config), formats))
    except BadInput as error:
        print(_told(error, options.file), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on ({work.partial})", file=sys.stderr)
        return 130
    print(_summary(totals, time.monotonic() - began, options.output), file=sys.stderr)
    return 1 if totals.failed else 0


async def _answer(work: Offline, engine: AsyncEngine, formats: Formats) -> Totals:
    await work.check()
    try:
        await engine.start()
        with showing(work, engine):
            return await work.answer(engine, formats)
    finally:
        await engine.close()


def _told(error: BadInput, file: str) -> str:
    lines = [f"tok batch: error: {file}: {len(error.errors)}{'+' if error.more else ''} bad lines; nothing was run"]
    lines += [f"  line {one.line}: {one.message}" for one in error.errors[:SHOWN]]
    return "\n".join([*lines, *(["  …"] if len(error.errors) > SHOWN else [])])


def _summary(totals: Totals, seconds: float, output: str) -> str:
    lines = totals.completed + totals.failed
    return (
        f"{lines:,} lines in {output}: {totals.completed:,} answered, {totals.failed:,} failed; "
        f"{totals.input_tokens:,} tokens of prompts, {totals.output_tokens:,} of answers; {seconds:,.1f} s"
    )

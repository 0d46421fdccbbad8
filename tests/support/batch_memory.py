"""Run a file of many lines through `tok batch`'s own parts and a tiny model, and measure the memory of the process.

`PYTHONPATH=tests python -m support.batch_memory 1000000` prints the peak memory of every tenth of the lines.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from support.batching import NAME, completion_line, jsonl
from support.tiny_models import make_model
from tok_core import AsyncEngine, EngineConfig
from tok_server.batch.offline.offline import OfflineBatch

TENTHS = 10
PADDING = 600
AT_ONCE = 1000
LINES_PER_STOP_CHECK = 0.02
MIB = 1 << 20


def write_lines(path: Path, lines: int, padding: int) -> None:
    """Write a file of `lines` lines, each of 200 bytes and `padding` more."""
    with path.open("wb") as stream:
        for first in range(0, lines, AT_ONCE):
            some = range(first, min(first + AT_ONCE, lines))
            stream.write(jsonl(completion_line(number, max_tokens=1, user="x" * padding) for number in some))


async def memory_of(directory: Path, model: Path, lines: int, padding: int = PADDING) -> list[int]:
    """Return the peak memory in bytes in each tenth of the lines; the last tenth includes writing the output."""
    write_lines(directory / "in.jsonl", lines, padding)
    config = EngineConfig(model=str(model), device="cpu", kv_cache_tokens=16_384, max_running=256)
    engine = AsyncEngine(config, in_process=True)
    with OfflineBatch(directory / "in.jsonl", directory / "out.jsonl", NAME) as work:
        await work.check()
        await engine.start()
        answering = asyncio.create_task(work.answer(engine))
        try:
            return await _watched(work, answering)
        finally:
            await answering
            await engine.close()


async def _watched(work: OfflineBatch, answering: asyncio.Task[object]) -> list[int]:
    most, process = [0] * TENTHS, psutil.Process()
    while not answering.done():
        totals = work.totals
        tenth = min(TENTHS - 1, (totals.completed + totals.failed) * TENTHS // work.lines)
        most[tenth] = max(most[tenth], process.memory_info().rss)
        await asyncio.sleep(LINES_PER_STOP_CHECK)
    return most


def same_lines(directory: Path) -> Iterator[tuple[str, str]]:
    """Yield the custom ids of input and output, line by line."""
    with (directory / "in.jsonl").open() as asked, (directory / "out.jsonl").open() as answered:
        for one, other in zip(asked, answered, strict=True):
            yield _custom_id(one), _custom_id(other)


def _custom_id(line: str) -> str:
    return line.split('"custom_id":', 1)[1].split('"', 2)[1]


def main(lines: int) -> None:
    """Print the result of `memory_of`."""
    with TemporaryDirectory() as name:
        directory, began = Path(name), time.monotonic()
        model = make_model("llama", directory / "tiny", layers=1)
        most = asyncio.run(memory_of(directory, model, lines))
        seconds = time.monotonic() - began
        assert all(asked == answered for asked, answered in same_lines(directory))
        size = (directory / "in.jsonl").stat().st_size + (directory / "out.jsonl").stat().st_size
    print(f"{lines:,} lines of {size / MIB:,.0f} MiB with their answers in {seconds:,.0f} s")
    print("most memory in each tenth, MiB:", *(f"{one / MIB:.0f}" for one in most))


if __name__ == "__main__":
    main(int(sys.argv[1]))

"""Show an offline batch's progress on standard error: a bar on a terminal, else a line every `LINE_SECONDS` seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tok_core import AsyncEngine
from tok_server.batch.offline.offline import OfflineBatch

BAR_SECONDS = 0.25
LINE_SECONDS = 30.0


class BatchProgress:
    """Progress of a run: lines done, their rate since the start, and the time left at that rate."""

    def __init__(self, batch: OfflineBatch, engine: AsyncEngine) -> None:
        self._work = batch
        self._engine = engine
        self._began = time.monotonic()
        self._lines: int | None = None  # lines done when the run began
        self._tokens = engine.stats()["output_tokens"]

    def read(self) -> tuple[int, str]:
        """Return the number of lines done, and a text with failures, token rate and time left."""
        totals = self._work.totals
        done = totals.completed + totals.failed
        if self._lines is None and done:
            self._lines = done  # lines of an earlier run do not count for the rate
            self._began = time.monotonic()
        seconds = max(time.monotonic() - self._began, 1e-3)
        rate = (done - (self._lines or 0)) / seconds
        tokens = (self._engine.stats()["output_tokens"] - self._tokens) / seconds
        left = duration((self._work.lines - done) / rate) if rate else "?"
        return done, f"{totals.failed:,} failed, {tokens:,.0f} tok/s, {left} left"


def duration(seconds: float) -> str:
    """Return the duration as hours, minutes and seconds: "1:02:03"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


@contextmanager
def show_progress(batch: OfflineBatch, engine: AsyncEngine) -> Iterator[None]:
    """Show the progress of `batch` while the context lasts."""
    console = Console(stderr=True)
    progress = BatchProgress(batch, engine)
    ended = threading.Event()
    show = _bar if console.is_terminal else _lines
    thread = threading.Thread(target=show, args=(batch, progress, console, ended), name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _bar(batch: OfflineBatch, progress: BatchProgress, console: Console, ended: threading.Event) -> None:
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rest]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, auto_refresh=False) as bar:
        task = bar.add_task("answering", total=batch.lines, rest="")
        while True:
            last = ended.is_set()
            done, rest = progress.read()
            bar.update(task, completed=done, rest=rest, refresh=True)
            if last:
                return
            ended.wait(BAR_SECONDS)


def _lines(batch: OfflineBatch, progress: BatchProgress, console: Console, ended: threading.Event) -> None:
    while not ended.wait(LINE_SECONDS):
        done, rest = progress.read()
        print(f"{done:,} of {batch.lines:,} lines, {rest}", file=sys.stderr, flush=True)

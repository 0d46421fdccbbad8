"""Show a progress bar for long generations: finished samples, tokens per second, time left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tok_core.outputs import Delta


class ProgressBar:
    """Counter of deltas, shown in `bar`, if there is one."""

    def __init__(self, bar: Progress | None, samples: int) -> None:
        self._bar = bar
        self._task = None if bar is None else bar.add_task("generating", total=samples, rate=0)
        self._tokens = 0
        self._began = time.monotonic()

    def advance(self, deltas: list[Delta]) -> None:
        """Count the new deltas of one request."""
        if self._bar is None or self._task is None:
            return
        self._tokens += sum(len(delta.token_ids) for delta in deltas)
        done = sum(delta.finish_reason is not None for delta in deltas)
        rate = self._tokens / max(time.monotonic() - self._began, 1e-9)
        self._bar.update(self._task, advance=done, rate=rate)


@contextmanager
def progress_bar(shown: bool, samples: int) -> Iterator[ProgressBar]:
    """Show a progress bar on standard error if `shown`."""
    if not shown:
        yield ProgressBar(None, samples)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:,.0f} tok/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield ProgressBar(bar, samples)

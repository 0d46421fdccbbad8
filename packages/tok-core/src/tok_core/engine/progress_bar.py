"""Progress bar of `Engine.generate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tok_core.outputs import Delta

AdvanceBar = Callable[[list[Delta]], None]  # takes the new deltas of one request


@contextmanager
def progress_bar(shown: bool, samples: int) -> Iterator[AdvanceBar]:
    """Show finished samples, tokens per second and time left on standard error, if `shown`.

    Yield a function that takes the new deltas of one request.
    """
    if not shown:
        yield lambda deltas: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:,.0f} tok/s"),
        TimeRemainingColumn(),
    )
    tokens, began = 0, time.monotonic()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("generating", total=samples, rate=0)

        def advance(deltas: list[Delta]) -> None:
            nonlocal tokens
            tokens += sum(len(delta.token_ids) for delta in deltas)
            done = sum(delta.finish_reason is not None for delta in deltas)
            bar.update(task, advance=done, rate=tokens / max(time.monotonic() - began, 1e-9))

        yield advance

"""Call a function periodically while a benchmark runs, and show the benchmark's progress."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

ShowProgress = Callable[[int, int, int], None]
"""Update the progress display: requests done, tokens generated, sequences running."""


@contextmanager
def call_periodically(function: Callable[[], None], every: float) -> Iterator[None]:
    """Call `function` at once, then every `every` seconds from a separate thread, and once more at the end."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(every):
            function()

    function()
    thread = threading.Thread(target=run, name="watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        function()


def throttled(
    action: Callable[[], None], every: float, clock: Callable[[], float] = time.monotonic
) -> Callable[[], None]:
    """Return a function that calls `action` on its first call, and then at most once every `every` seconds."""
    due = -math.inf

    def call() -> None:
        nonlocal due
        if clock() >= due:
            due = clock() + every
            action()

    return call


@contextmanager
def progress_bar(title: str, requests: int) -> Iterator[ShowProgress]:
    """Show a progress bar on standard error if that is a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[running]:,} running, {task.fields[rate]:,.0f} tok/s"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, auto_refresh=False) as bar:
        task = bar.add_task(title, total=requests, running=0, rate=0.0)
        began = time.monotonic()

        def show(done: int, tokens: int, running: int) -> None:
            rate = tokens / max(time.monotonic() - began, 1e-9)
            bar.update(task, completed=done, running=running, rate=rate, refresh=True)

        yield show

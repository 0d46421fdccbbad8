"""Watch: looks at a run again and again while it lasts, and shows how far it is."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Show = Callable[[int, int, int], None]
"""Draws: requests done, tokens generated, sequences running."""


@contextmanager
def watching(look: Callable[[], None], every: float) -> Iterator[None]:
    """Calls `look` at once, every so many seconds from a thread of its own, and once more at the end."""
    ended = threading.Event()

    def keep_looking() -> None:
        while not ended.wait(every):
            look()

    look()
    thread = threading.Thread(target=keep_looking, name="watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        look()


def seldom(action: Callable[[], None], every: float, clock: Callable[[], float] = time.monotonic) -> Callable[[], None]:
    """`action`, carried out when called for the first time, and then only if its last time is `every` seconds ago."""
    due = -math.inf

    def act() -> None:
        nonlocal due
        if clock() >= due:
            due = clock() + every
            action()

    return act


@contextmanager
def progress_bar(title: str, requests: int) -> Iterator[Show]:
    """A bar on standard error, where that is a terminal."""
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

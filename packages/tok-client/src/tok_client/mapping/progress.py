"""Show the progress of a run in one line on a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO


class MappingProgress:
    """Progress display on `stream`: updated in place ten times a second on a terminal, else a line every ten seconds.

    `total` is the number of prompts, if known. `clock` returns seconds. Without a stream nothing is shown.
    """

    def __init__(self, stream: TextIO | None, total: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._total = total
        self._clock = clock
        self._in_place = stream is not None and stream.isatty()
        self._started_at = self._shown_at = clock()
        self._width = 0
        self.answered = self.failed = self.skipped = 0

    def update(self) -> None:
        """Show the counts, unless they were shown just before."""
        if self._stream is not None and self._clock() - self._shown_at >= (0.1 if self._in_place else 10.0):
            self._show()

    def end(self) -> None:
        """Show the counts for the last time."""
        if self._stream is not None:
            self._show()
            if self._in_place:
                self._write("\n")

    def line(self) -> str:
        """Return the text to show now."""
        count, elapsed = self.answered + self.failed, self._clock() - self._started_at
        processed, rate = count + self.skipped, count / elapsed if elapsed > 0 else 0.0
        total_text = "" if self._total is None else f"/{self._total} ({processed / max(1, self._total):.0%})"
        parts = [f"{processed}{total_text}", f"{rate:.1f}/s"]
        if self.skipped:
            parts.append(f"{self.skipped} from an earlier run")
        if self.failed:
            parts.append(f"{self.failed} failed")
        if self._total is not None and rate and processed < self._total:
            parts.append(f"{_format_duration((self._total - processed) / rate)} left")
        return ", ".join(parts)

    def _show(self) -> None:
        self._shown_at, line = self._clock(), self.line()
        self._write("\r" + line.ljust(self._width) if self._in_place else line + "\n")
        self._width = len(line)

    def _write(self, text: str) -> None:
        if self._stream is not None:
            self._stream.write(text)
            self._stream.flush()


def _format_duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"

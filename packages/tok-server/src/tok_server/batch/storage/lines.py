"""Read the lines of a JSONL file as a stream, with one line in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from tok_server.batch.storage.database import StoreError
from tok_server.wire import BadJson, decode

SLICE_BYTES = 1 << 20  # bytes of a too long line skipped at a time
LINES_PER_STOP_CHECK = 4096  # lines between checks of `stopped`


class Stopped(Exception):
    """The caller no longer wants the result."""


class InputChanged(StoreError):
    """A file that has changed since it was validated; the message says how."""


class InputLine(NamedTuple):
    """A line that is not blank.

    row     counts the lines that are not blank, from 0
    number  counts all lines, from 1, as editors do
    data    None: the line has more bytes than allowed
    """

    row: int
    number: int
    data: bytes | None


class LineRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The request of a line, with its body not yet decoded."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


def read_lines(
    path: Path, max_bytes: int | None = None, stopped: Callable[[], bool] = lambda: False
) -> Iterator[InputLine]:
    """Yield the lines that are not blank.

    max_bytes  maximum bytes of a line; None: unlimited, for a file whose lines have been validated

    Errors: Stopped, OSError.
    """
    row = number = 0
    with path.open("rb") as stream:
        while data := stream.readline(-1 if max_bytes is None else max_bytes + 2):
            if number % LINES_PER_STOP_CHECK == 0 and stopped():  # blank lines count: they take time, too
                raise Stopped
            number += 1
            text = data.strip()
            too_long = max_bytes is not None and len(data.rstrip(b"\r\n")) > max_bytes
            while too_long and not data.endswith(b"\n") and (data := stream.readline(SLICE_BYTES)):
                pass
            if text:
                yield InputLine(row, number, None if too_long else text)
                row += 1


def parse_line(data: bytes) -> LineRequest:
    """Return the request of a line. Errors: BadJson."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise BadJson(None, f"is not valid UTF-8: {error.reason} at byte {error.start}") from error
    return decode(data, LineRequest)


def parse_known_line(path: Path, line: InputLine) -> LineRequest:
    """Return the request of a line that was validated before. Errors: InputChanged."""
    try:
        return parse_line(line.data or b"")
    except BadJson as error:
        raise InputChanged(f"line {line.number} of {path.name} {error}") from error

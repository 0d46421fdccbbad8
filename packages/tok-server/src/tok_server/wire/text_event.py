"""TextEvent: the server-sent event of a choice that gained nothing but text, written once but for that text."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tok_server.wire.json import encode

MARK = "\0text\0"  # names of models and ids hold no such character
QUOTED = encode(MARK)


class TextEvent:
    """Of one choice. Most events of a stream are like it: all but the text is the same in each.

    chunk  the chunk by which the choice gains a text
    """

    __slots__ = ("_after", "_before")

    def __init__(self, chunk: Callable[[str], msgspec.Struct]) -> None:
        before, after = encode(chunk(MARK)).split(QUOTED)
        self._before, self._after = b"data: " + before, after + b"\n\n"

    def of(self, text: str) -> bytes:
        """The event."""
        return self._before + encode(text) + self._after

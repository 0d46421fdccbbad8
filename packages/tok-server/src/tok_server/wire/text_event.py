"""TextEvent: the server-sent event of a choice that only gains text, encoded once except for the text."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tok_server.wire.json import encode

PLACEHOLDER = "\0text\0"  # stands for the text; names of models and ids do not contain NUL
QUOTED_PLACEHOLDER = encode(PLACEHOLDER)


class TextEvent:
    """Template for the events of one choice. Most events of a stream differ only in their text.

    chunk  returns the chunk by which the choice gains a text
    """

    __slots__ = ("_after", "_before")

    def __init__(self, chunk: Callable[[str], msgspec.Struct]) -> None:
        before, after = encode(chunk(PLACEHOLDER)).split(QUOTED_PLACEHOLDER)
        self._before, self._after = b"data: " + before, after + b"\n\n"

    def encode(self, text: str) -> bytes:
        """Return the event for `text`."""
        return self._before + encode(text) + self._after

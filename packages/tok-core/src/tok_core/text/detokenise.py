"""Detokeniser: one sample's text while its tokens arrive, each character once and none too early.

Positions are bytes of the pieces of *all* generated tokens, special ones included, counted from the first: in
these bytes stop strings are found, and in those that are shown: the bytes of the tokens that are not special. Bytes go
through three stations: those that may yet belong to a stop string wait in `_tail`; released, they pass an
incremental UTF-8 decoder, which holds an unfinished character back.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from functools import lru_cache

from tok_core.text.tokenizer import Tokenizer


class Detokeniser:
    """Text of one sample, incrementally.

    The text continues the prompt: the leading space of a first sentencepiece-like token is shown. An end
    token that is not special, but shall not be shown, is not pushed.

    stops   stop strings of the request; a tail that may be the beginning of one, and one that the last pushed
            token completed, are withheld: further tokens or `finish` tell whether they are text.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._utf8 = _Characters()
        self._watches = [_Watch(stop.encode()) for stop in stops]
        self._of_shown: list[_Watch] | None = None  # of the bytes shown, once others differ from them
        self._tail: deque[tuple[bytes, bytes]] = deque()  # piece, and what is visible of it: all or nothing
        self._released = 0
        self._seen = 0

    def push(self, ids: Sequence[int]) -> str:
        """What can be shown now that `ids` follow; cost does not depend on what was pushed before."""
        if len(ids) == 1:
            return self.push_one(ids[0])
        if self._watches:
            return "".join([self.push_one(token) for token in ids])
        return self._utf8.decode(b"".join(self._tokenizer.pieces_of(ids, skip_special_tokens=True)))

    def push_one(self, token: int) -> str:
        """The same for one token."""
        piece, shown = self._tokenizer.piece_and_shown(token)
        if not self._watches:
            return self._utf8.decode(shown)
        self._seen += len(piece)
        if self._of_shown is None and len(shown) < len(piece):
            self._of_shown = [watch.copy() for watch in self._watches]
        held = _feed(self._watches, piece)
        held_of_shown = 0 if self._of_shown is None else _feed(self._of_shown, shown)
        if not held and not held_of_shown and not self._tail:
            self._released = self._seen
            return self._utf8.decode(shown)
        self._tail.append((piece, shown))
        if held_of_shown:
            held = max(held, self._size_of(held_of_shown))
        return self._utf8.decode(self._release(self._seen - held))

    def finish(self, keep_bytes: int | None = None) -> str:
        """The rest. `keep_bytes`: position where the stop string that ended the sample starts, None without.

        Errors: ValueError if text from there on has been shown: the stop string was not among `stops`.
        """
        if keep_bytes is not None and not self._watches:
            raise ValueError(f"keep_bytes is {keep_bytes}, but there are no stop strings: all is shown")
        end = self._seen if keep_bytes is None else keep_bytes
        if not self._released <= end <= self._seen:
            raise ValueError(f"keep_bytes is {end}; withheld are {self._released} to {self._seen}")
        text = self._utf8.decode(self._release(end), final=True)
        self._tail.clear()
        return text

    def _size_of(self, shown_bytes: int) -> int:
        """Return how many bytes of all pieces there are from the first of the last `shown_bytes` on."""
        size = 0
        for piece, shown in reversed(self._tail):
            if shown_bytes <= len(shown):
                return size + shown_bytes
            size += len(piece)
            shown_bytes -= len(shown)
        return size

    def _release(self, end: int) -> bytes:
        """Takes the bytes before position `end` off the tail; what of them is visible."""
        parts = []
        while self._tail and self._released < end:
            piece, shown = self._tail.popleft()
            count = min(len(piece), end - self._released)
            parts.append(shown[:count])
            if count < len(piece):
                self._tail.appendleft((piece[count:], shown[count:]))
            self._released += count
        return b"".join(parts)


def _feed(watches: Sequence[_Watch], piece: bytes) -> int:
    """Return how many of the last bytes may belong to any of the stop strings, now that `piece` follows."""
    held = 0
    for watch in watches:
        watch.feed(piece)
        held = max(held, watch.held)
    return held


class _Characters:
    """UTF-8 as text, an unfinished character held back. As `codecs` has it, but quick: it is asked for each token."""

    __slots__ = ("_begun",)

    def __init__(self) -> None:
        self._begun = b""

    def decode(self, data: bytes, final: bool = False) -> str:
        """What is whole now; what is no UTF-8 becomes U+FFFD."""
        if self._begun:
            data = self._begun + data
        text, used = codecs.utf_8_decode(data, "replace", final)
        self._begun = data[used:]
        return text


class _Watch:
    """How many of the last bytes may belong to one stop string (Knuth, Morris and Pratt 1977)."""

    __slots__ = ("_borders", "_first", "_state", "_stop", "held")

    def __init__(self, stop: bytes) -> None:
        self._stop = stop
        self._first = stop[:1]
        self._borders = _borders(stop)
        self._state = 0
        self.held = 0

    def copy(self) -> _Watch:
        """Return another one that has been fed the same."""
        found = _Watch(self._stop)
        found._state, found.held = self._state, self.held
        return found

    def feed(self, piece: bytes) -> None:
        """Then `held` is the longest suffix that begins the stop string or begins with one ended here."""
        if not self._state and self._first not in piece:
            self.held = 0
            return
        stop, borders, state = self._stop, self._borders, self._state
        held = 0
        at = 0
        while at < len(piece):
            if state == 0:
                at = piece.find(self._first, at)
                if at < 0:
                    break
            while state and stop[state] != piece[at]:
                state = borders[state]
            state += stop[state] == piece[at]
            at += 1
            if state == len(stop):
                held = max(held, state + len(piece) - at)
                state = borders[state]
        self._state = state
        self.held = max(held, state)


@lru_cache(maxsize=128)
def _borders(stop: bytes) -> list[int]:
    """By length of a prefix of `stop`: the length of its longest border (proper prefix that is a suffix)."""
    borders = [0, 0]
    for byte in stop[1:]:
        state = borders[-1]
        while state and stop[state] != byte:
            state = borders[state]
        borders.append(state + (stop[state] == byte))
    return borders

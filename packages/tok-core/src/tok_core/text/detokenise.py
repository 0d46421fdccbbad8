"""Detokenise one sample incrementally: return each character once, as soon as it is final.

Positions are byte offsets in the pieces of *all* generated tokens, special ones included. Stop strings are searched in
these bytes, and also in the shown bytes: those of tokens that are not special. Bytes that may belong to a stop string
wait in `_tail`. Once released, they pass an incremental UTF-8 decoder, which holds back an unfinished character.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from functools import lru_cache

from tok_core.text.tokenizer import Tokenizer


class Detokeniser:
    """Text of one sample, built incrementally.

    The text continues the prompt, so the leading space of a first sentencepiece-like token is shown. The caller must
    not push an end token that is not special but must stay hidden.

    stops   stop strings of the request. Bytes at the end that may begin one, or in which the last pushed token
            completed one, are withheld until further tokens or `finish` decide whether they are text.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = _Characters()
        self._watches = [_Watch(stop.encode()) for stop in stops]
        self._of_shown: list[_Watch] | None = None  # watches over the shown bytes, once these differ from all bytes
        self._tail: deque[tuple[bytes, bytes]] = deque()  # (piece, its shown bytes: all or none)
        self._released = 0
        self._seen = 0

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that can be shown now that `ids` follow; the cost does not depend on earlier tokens."""
        if len(ids) == 1:
            return self.push_one(ids[0])
        if self._watches:
            return "".join([self.push_one(token) for token in ids])
        return self._utf8.decode(b"".join(self._tokenizer.pieces_of(ids, self._skip_special_tokens)))

    def push_one(self, token: int) -> str:
        """Return the text that can be shown now that one token follows."""
        piece, shown = self._tokenizer.piece_and_shown(token)
        if not self._skip_special_tokens:
            shown = piece
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
        """Return the rest. `keep_bytes`: position of the stop string that ended the sample; None without one.

        Raise ValueError if text from there on has been shown: the stop string was not among `stops`.
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
        """Return the number of bytes of all pieces from the first of the last `shown_bytes` shown bytes on."""
        size = 0
        for piece, shown in reversed(self._tail):
            if shown_bytes <= len(shown):
                return size + shown_bytes
            size += len(piece)
            shown_bytes -= len(shown)
        return size

    def _release(self, end: int) -> bytes:
        """Remove the bytes before position `end` from the tail, and return their shown part."""
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
    """Feed `piece` to all watches; return how many of the last bytes may belong to a stop string."""
    held = 0
    for watch in watches:
        watch.feed(piece)
        held = max(held, watch.held)
    return held


class _Characters:
    """Incremental UTF-8 decoder that holds back an unfinished character.

    Equivalent to the incremental decoder of `codecs`, but faster, because it runs once per token.
    """

    __slots__ = ("_begun",)

    def __init__(self) -> None:
        self._begun = b""

    def decode(self, data: bytes, final: bool = False) -> str:
        """Return the characters that are complete; invalid UTF-8 becomes U+FFFD."""
        if self._begun:
            data = self._begun + data
        text, used = codecs.utf_8_decode(data, "replace", final)
        self._begun = data[used:]
        return text


class _Watch:
    """Search for one stop string; `held` counts the last bytes that may belong to it (Knuth, Morris and Pratt 1977)."""

    __slots__ = ("_borders", "_first", "_state", "_stop", "held")

    def __init__(self, stop: bytes) -> None:
        self._stop = stop
        self._first = stop[:1]
        self._borders = _borders(stop)
        self._state = 0
        self.held = 0

    def copy(self) -> _Watch:
        """Return a copy in the same state."""
        found = _Watch(self._stop)
        found._state, found.held = self._state, self.held
        return found

    def feed(self, piece: bytes) -> None:
        """Set `held` to the longest suffix that begins the stop string, or begins with one that ended in this piece."""
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
    """Return, by length of a prefix of `stop`, the length of its longest border (proper prefix that is a suffix)."""
    borders = [0, 0]
    for byte in stop[1:]:
        state = borders[-1]
        while state and stop[state] != byte:
            state = borders[state]
        borders.append(state + (stop[state] == byte))
    return borders

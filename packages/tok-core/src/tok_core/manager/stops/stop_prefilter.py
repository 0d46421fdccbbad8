"""Rule out stop strings for many rows at once by the bytes around the start of each new token.

A stop string that ends within a token and begins before it spans the token's start, its border. With k bytes behind the
border, the string's last eight bytes are the last 8 − k bytes before the token and the token's first k bytes. Together
they are one number of 64 bits, which is compared with the text for each possible k.

    stop string "</answer>", text "… </ans", new token "wer>." and k = 4: "/ans" + "wer>" is compared with "/answer>"

For strings of up to eight bytes this decides. Of longer strings that pass, the rest still has to be searched.

Legend: n rows, S stop sets, M the longest sequence in tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tok_core.messages import Int32, Int64
from tok_core.text import MAX_BORDER_BYTES, WORD, PieceBytes, Words

Bools = npt.NDArray[np.bool_]


class TokenRows(NamedTuple):
    """Samples, and the places of their tokens.

    tokens  int32 [slots, M]
    slot    int64 [n] rows of `tokens`
    first   int32 [n] index in its row of a sample's first generated token
    last    int32 [n] index of its new token
    """

    tokens: Int32
    slot: Int64
    first: Int32
    last: Int32


class StopStringPrefilter:
    """Last bytes of the stop strings of each set.

    ends   uint64 [strings, S] up to eight last bytes of each, the very last as the lowest; `masks`: the bits they use
    width  int64 [S] number of a set's strings of two bytes or more; shorter ones cannot span a border
    reach  int64 [S] number of bytes before a new token that are compared
    """

    def __init__(self, pieces: PieceBytes, sets: int, hidden: Collection[int] = ()) -> None:
        self._pieces = pieces
        self._hidden: Bools | None = None  # [V] tokens whose bytes clients do not see; None: there are none
        if hidden:
            self._hidden = np.zeros(len(pieces.sizes), np.bool_)
            self._hidden[list(hidden)] = True
        self._ends: Words = np.zeros((1, sets), np.uint64)
        self._masks: Words = np.zeros((1, sets), np.uint64)
        self._width: Int64 = np.zeros(sets, np.int64)
        self._reach: Int64 = np.zeros(sets, np.int64)

    def put(self, set_id: int, stops: Sequence[bytes]) -> None:
        """Set the stop strings of `set_id`, replacing any earlier ones."""
        ends = [stop[-WORD:] for stop in stops if len(stop) > 1]
        self._make_room(set_id, len(ends))
        self._width[set_id] = len(ends)
        self._reach[set_id] = max(map(len, ends), default=1) - 1
        self._ends[: len(ends), set_id] = _words(int.from_bytes(end, "big") for end in ends)
        self._masks[: len(ends), set_id] = _words((1 << 8 * len(end)) - 1 for end in ends)

    def possible(self, set_ids: Int32, rows: TokenRows) -> Bools:
        """Return bool [n]: whether a stop string may begin before the new token and end in its first bytes.

        False is certain. For strings of up to eight bytes True is certain, too, unless they hold zero bytes, or tokens
        without bytes or with hidden bytes precede the new one.
        """
        reach = self._reach[set_ids]
        longest = int(reach.max(initial=0))
        head = self._pieces.heads[rows.tokens[rows.slot, rows.last]]
        before, found = self._before(reach, longest, rows)
        shift = 8 * np.arange(1, longest + 1, dtype=np.uint64)[:, None]
        text: Words = (before << shift) | (head >> (8 * WORD - shift))
        return found | self._ends_with(text, set_ids)

    def _before(self, reach: Int64, longest: int, rows: TokenRows) -> tuple[Words, Bools]:
        """Return the last bytes before each new token, up to `reach`, and where they are unknown.

        They are unknown if too many of the last `longest` tokens have no bytes, or if one of these is hidden.
        """
        at = rows.last - np.arange(1, longest + 1)[:, None]  # [longest, n]
        token = rows.tokens[rows.slot, np.maximum(at, 0)]
        size = self._pieces.sizes.take(token)
        # Tokens further back only affect the highest of the eight bytes, which no comparison needs.
        shift = 8 * np.minimum(size.cumsum(0) - size, MAX_BORDER_BYTES).astype(np.uint64)
        text: Words = np.bitwise_or.reduce(self._pieces.tails.take(token) * (at >= rows.first) << shift, axis=0)
        unknown: Bools = (size.sum(0) < reach) & (rows.last - longest > rows.first)
        if self._hidden is not None:  # the text without hidden bytes has to be searched, too
            unknown |= (self._hidden.take(token) & (at >= rows.first)).any(0)
        return text, unknown

    def _ends_with(self, text: Words, set_ids: Int32) -> Bools:
        """Return bool [n]: whether one of a row's texts, [k, n], ends like one of its set's strings."""
        width = self._width[set_ids]
        found = np.zeros(len(set_ids), np.bool_)
        for ends, masks, number in zip(self._ends, self._masks, range(int(width.max(initial=0))), strict=False):
            rows = (width > number).nonzero()[0]
            sets = set_ids[rows]
            found[rows] |= ((text.take(rows, axis=1) ^ ends.take(sets)) & masks.take(sets) == 0).any(0)
        return found

    def _make_room(self, set_id: int, strings: int) -> None:
        strings, sets = max(0, strings - self._ends.shape[0]), max(0, set_id + 1 - self._ends.shape[1])
        sets = sets and max(sets, self._ends.shape[1])  # grow to at least twice as many as before
        if strings or sets:
            self._ends, self._masks = (np.pad(one, ((0, strings), (0, sets))) for one in (self._ends, self._masks))
            self._width, self._reach = np.pad(self._width, (0, sets)), np.pad(self._reach, (0, sets))


def _words(numbers: Iterable[int]) -> Words:
    return np.fromiter(numbers, np.uint64)

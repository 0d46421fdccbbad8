"""Rule out stop strings for many rows at once by the bytes around the start of each new token.

A stop string that ends within a token and begins before it has a border in it. Laid over that border, its last
eight bytes are the last ones before the token and the token's first ones: one number of 64 bits, which is compared
for each place that the border may have. Strings of up to eight bytes need no more; of longer ones that pass, the
rest is still to be looked at.

Legend: n rows, S stop sets, M the longest sequence in tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tok_core.messages import Int32, Int64
from tok_core.text import SHORT, WORD, PieceBytes, Words

Bools = npt.NDArray[np.bool_]


class TokenRows(NamedTuple):
    """Samples, and where their tokens are.

    tokens  int32 [slots, M]
    slot    int64 [n] rows of `tokens`
    first   int32 [n] where in its row a sample's generated tokens begin
    last    int32 [n] where its new token is
    """

    tokens: Int32
    slot: Int64
    first: Int32
    last: Int32


class StopStringPrefilter:
    """The last bytes of each set's stop strings.

    ends   uint64 [strings, S] up to eight bytes each, the last as the lowest; `masks`: which bits are theirs
    width  int64 [S] how many strings of two bytes or more a set has: others have no border in them
    reach  int64 [S] how many bytes before a new token have to be known
    """

    def __init__(self, pieces: PieceBytes, sets: int, hidden: Collection[int] = ()) -> None:
        self._pieces = pieces
        self._hidden: Bools | None = None  # [V] tokens whose bytes are not shown; None: there are none
        if hidden:
            self._hidden = np.zeros(len(pieces.sizes), np.bool_)
            self._hidden[list(hidden)] = True
        self._ends: Words = np.zeros((1, sets), np.uint64)
        self._masks: Words = np.zeros((1, sets), np.uint64)
        self._width: Int64 = np.zeros(sets, np.int64)
        self._reach: Int64 = np.zeros(sets, np.int64)

    def put(self, set_id: int, stops: Sequence[bytes]) -> None:
        """The stop strings of `set_id`, whatever it stood for before."""
        ends = [stop[-WORD:] for stop in stops if len(stop) > 1]
        self._make_room(set_id, len(ends))
        self._width[set_id] = len(ends)
        self._reach[set_id] = max(map(len, ends), default=1) - 1
        self._ends[: len(ends), set_id] = _words(int.from_bytes(end, "big") for end in ends)
        self._masks[: len(ends), set_id] = _words((1 << 8 * len(end)) - 1 for end in ends)

    def possible(self, set_ids: Int32, rows: TokenRows) -> Bools:
        """Bool [n]: where a stop string may end within the first SHORT bytes of the new token and begin before it.

        False is certain. True is certain too for strings of up to eight bytes, unless they hold zero bytes or
        tokens without bytes, or whose bytes are not shown, lie before.
        """
        reach = self._reach[set_ids]
        longest = int(reach.max(initial=0))
        head = self._pieces.heads[rows.tokens[rows.slot, rows.last]]
        before, found = self._before(reach, longest, rows)
        shift = 8 * np.arange(1, longest + 1, dtype=np.uint64)[:, None]
        text: Words = (before << shift) | (head >> (8 * WORD - shift))
        return found | self._ends_with(text, set_ids)

    def _before(self, reach: Int64, longest: int, rows: TokenRows) -> tuple[Words, Bools]:
        """The `reach` bytes before each new token, or all if there are fewer; and where too many tokens have none to
        tell."""
        at = rows.last - np.arange(1, longest + 1)[:, None]  # [longest, n]
        token = rows.tokens[rows.slot, np.maximum(at, 0)]
        size = self._pieces.sizes.take(token)
        # Of what lies further back only the text's first byte is made up, which no border needs.
        shift = 8 * np.minimum(size.cumsum(0) - size, SHORT).astype(np.uint64)
        text: Words = np.bitwise_or.reduce(self._pieces.tails.take(token) * (at >= rows.first) << shift, axis=0)
        unknown: Bools = (size.sum(0) < reach) & (rows.last - longest > rows.first)
        if self._hidden is not None:  # the text without their bytes is to be searched, too
            unknown |= (self._hidden.take(token) & (at >= rows.first)).any(0)
        return text, unknown

    def _ends_with(self, text: Words, set_ids: Int32) -> Bools:
        """Bool [n]: where one of the texts [k, n] has the last bytes of one of the set's strings."""
        width = self._width[set_ids]
        found = np.zeros(len(set_ids), np.bool_)
        for ends, masks, number in zip(self._ends, self._masks, range(int(width.max(initial=0))), strict=False):
            rows = (width > number).nonzero()[0]
            sets = set_ids[rows]
            found[rows] |= ((text.take(rows, axis=1) ^ ends.take(sets)) & masks.take(sets) == 0).any(0)
        return found

    def _make_room(self, set_id: int, strings: int) -> None:
        strings, sets = max(0, strings - self._ends.shape[0]), max(0, set_id + 1 - self._ends.shape[1])
        sets = sets and max(sets, self._ends.shape[1])  # at least twice as many as before
        if strings or sets:
            self._ends, self._masks = (np.pad(one, ((0, strings), (0, sets))) for one in (self._ends, self._masks))
            self._width, self._reach = np.pad(self._width, (0, sets)), np.pad(self._reach, (0, sets))


def _words(numbers: Iterable[int]) -> Words:
    return np.fromiter(numbers, np.uint64)

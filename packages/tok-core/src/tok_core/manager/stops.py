"""Look up, for all tokens of a step at once, whether they end their samples.

Each distinct set of stop conditions is one row of flags in a mask matrix, with a column per token (`StopSets`).
`EndingIndex` finds the tokens that may complete a stop string beforehand. Most of these do not complete it, since the
string's beginning does not precede them. `StopStringPrefilter` rules them out by a few bytes, for all flagged samples
at once. Only the remaining samples are searched, and only at their end. Stop strings are searched in the bytes of all
generated tokens, special tokens included. If there are special tokens, the text without them is searched, too, since
that is what clients see.

Legend: n rows, one for each token of a step; V vocabulary; S stop sets; M the longest sequence in tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tok_core.errors import InvalidField
from tok_core.messages import Int32, Int64
from tok_core.sampling_params import SamplingParams
from tok_core.text import MAX_SPANNING_BYTES, WORD, CompletingTokens, EndingIndex, PieceBytes, Words

Bools = NDArray[np.bool_]


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
    """Last bytes of the stop strings of each set, compared with the bytes around the start of each new token.

    A stop string that ends within a token and begins before it spans the token's start. With k bytes in the token,
    the string's last eight bytes are the last 8 − k bytes before the token and the token's first k bytes.
    Together they are one number of 64 bits, which is compared with the text for each possible k.

        stop string "</answer>", text "… </ans", new token "wer>." and k = 4: "/ans" + "wer>" against "/answer>"

    For strings of up to eight bytes this decides. Of longer strings that pass, the rest still has to be searched.

    ends   uint64 [strings, S] up to eight last bytes of each, the very last as the lowest; `masks`: the bits they use
    width  int64 [S] number of a set's strings of two bytes or more; shorter ones cannot span the start of a token
    reach  int64 [S] number of bytes before a new token that are compared
    """

    def __init__(self, pieces: PieceBytes, sets: int, hidden: Collection[int]) -> None:
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
        self._grow(set_id, len(ends))
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

        The bytes are unknown if too many of the last `longest` tokens have no bytes, or if one of these is hidden.
        """
        at = rows.last - np.arange(1, longest + 1)[:, None]  # [longest, n]
        token = rows.tokens[rows.slot, np.maximum(at, 0)]
        size = self._pieces.sizes.take(token)
        # Tokens further back only affect the highest of the eight bytes, which no comparison needs.
        shift = 8 * np.minimum(size.cumsum(0) - size, MAX_SPANNING_BYTES).astype(np.uint64)
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

    def _grow(self, set_id: int, strings: int) -> None:
        strings, sets = max(0, strings - self._ends.shape[0]), max(0, set_id + 1 - self._ends.shape[1])
        sets = sets and max(sets, self._ends.shape[1])  # grow to at least twice as many as before
        if strings or sets:
            self._ends, self._masks = (np.pad(one, ((0, strings), (0, sets))) for one in (self._ends, self._masks))
            self._width, self._reach = np.pad(self._width, (0, sets)), np.pad(self._reach, (0, sets))


def _words(numbers: Iterable[int]) -> Words:
    return np.fromiter(numbers, np.uint64)


END = 1  # one of the model's own EOS ids
STOP_ID = 2  # one of the request's stop_token_ids
MAYBE_STRING = 4  # may complete one of the request's stop strings: call `find`
WITHIN = 8  # may do so whatever the bytes before it are; without this flag, call `possible` first
NONE_HIDDEN: frozenset[int] = frozenset()
CACHED_STRINGS = 256  # stop strings whose completing tokens are cached; the least recently used one is dropped


class StopHit(msgspec.Struct, frozen=True):
    """Stop string that a sample's last token has completed.

    cut  number of bytes before the end of the text: where the stop string begins, or where it ends, with
         `include_stop_str_in_output`
    """

    stop: str
    cut: int


class _StopSet(msgspec.Struct, frozen=True):
    ignore_eos: bool
    token_ids: frozenset[int]
    strings: frozenset[str]
    included: bool
    skip_special_tokens: bool


class StopSets:
    """Interned sets of stop conditions; equal ones share an id, which is a row of the mask matrix.

    vocab_size  V: number of token ids that the model can sample
    eos_ids     the model's own EOS ids; those from V on cannot be sampled and are left out
    pieces      bytes of each token id, missing ones taken as empty; None without a tokenizer
    hidden_ids  ids of special tokens, which clients do not see
    """

    def __init__(
        self,
        vocab_size: int,
        eos_ids: Sequence[int],
        pieces: Sequence[bytes] | None,
        hidden_ids: Collection[int] = (),
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_ids = [token for token in eos_ids if token < vocab_size]
        self._has_text = pieces is not None
        self._pieces = list(pieces or ())[:vocab_size]
        self._pieces += [b""] * (vocab_size - len(self._pieces))
        arrays = PieceBytes(self._pieces)
        self._sizes = arrays.sizes
        self._index = EndingIndex(arrays)
        self._completing: OrderedDict[str, CompletingTokens] = OrderedDict()
        self._masks = np.zeros((4, vocab_size), np.uint8)
        self._hidden = frozenset(token for token in hidden_ids if token < vocab_size and self._pieces[token])
        self._prefilter = StopStringPrefilter(arrays, len(self._masks), self._hidden)
        self._free = list(range(len(self._masks)))[::-1]
        self._ids: dict[_StopSet, int] = {}
        self._sets: dict[int, _StopSet] = {}
        self._stops: dict[int, list[bytes]] = {}
        self._users: dict[int, int] = {}

    def acquire(self, params: SamplingParams) -> int:
        """Return the id of the stop conditions of `params`; each call needs one `release`.

        Raises InvalidField for stop strings without a tokenizer and for stop_token_ids outside of the vocabulary;
        nothing is acquired then. SamplingParams have refused stop strings that are not valid Unicode.
        """
        key = _StopSet(
            params.ignore_eos,
            frozenset(params.stop_token_ids),
            frozenset(params.stop),
            params.include_stop_str_in_output,
            params.skip_special_tokens,
        )
        if key not in self._ids:
            self._check(params)
            self._add(key)
        set_id = self._ids[key]
        self._users[set_id] += 1
        return set_id

    def release(self, set_id: int) -> None:
        """Release one use of `set_id`; its row is reused when none is left."""
        self._users[set_id] -= 1
        if self._users[set_id] == 0:
            del self._ids[self._sets.pop(set_id)], self._stops[set_id], self._users[set_id]
            self._free.append(set_id)

    def classify(self, set_ids: Int32, tokens: Int32) -> NDArray[np.uint8]:
        """Return the flags, uint8 [n], of each row's new token in its set: END, STOP_ID, MAYBE_STRING and WITHIN."""
        places = set_ids.astype(np.int64) * self._vocab_size + tokens
        return self._masks.reshape(-1).take(places)

    def possible(self, set_ids: Int32, rows: TokenRows) -> Bools:
        """Return bool [n]: whether to call `find` for rows flagged MAYBE_STRING and not WITHIN. False is certain."""
        return self._prefilter.possible(set_ids, rows)

    def find(self, set_id: int, tokens: Int32) -> StopHit | None:
        """Return the stop string of `set_id` that the last of `tokens` completes; `tokens` are all of the sample.

        Of several, the one that ends first counts; of those that end at the same byte, the longest.
        """
        key, stops = self._sets[set_id], self._stops[set_id]
        size = int(self._sizes[tokens].sum())
        last = self._pieces[tokens[-1]]
        before, count = self._end(tokens[:-1], len(stops[0]) - 1)
        found = [(-behind, size - behind - len(stop), stop) for _, behind, stop in _ends_in(before, last, stops)]
        hidden = self._hidden if key.skip_special_tokens else NONE_HIDDEN
        if int(tokens[-1]) not in hidden and not hidden.isdisjoint(tokens[-1 - count : -1].tolist()):
            shown, count = self._end(tokens[:-1], len(stops[0]) - 1, self._hidden)
            recent = tokens[-1 - count :].tolist()
            found += [
                (-behind, size - self._size_from(recent, at), stop) for at, behind, stop in _ends_in(shown, last, stops)
            ]
        if not found:
            return None
        behind, cut, stop = min(found)
        return StopHit(stop.decode(), size + behind if key.included else cut)

    def _end(self, tokens: Int32, size: int, hidden: Collection[int] = ()) -> tuple[bytes, int]:
        """Return the bytes of the last tokens, at least `size`, and the number of these tokens; skip `hidden` ones."""
        end, at = b"", len(tokens)
        while len(end) < size and at:
            at -= 1
            if (token := int(tokens[at])) not in hidden:
                end = self._pieces[token] + end
        return end, len(tokens) - at

    def _size_from(self, tokens: Sequence[int], at: int) -> int:
        """Return how many bytes of `tokens` follow byte `at` of the text without hidden tokens, that byte included."""
        size = sum(len(self._pieces[token]) for token in tokens)
        for token in tokens:
            piece = self._pieces[token]
            if token not in self._hidden:
                if at < len(piece):
                    return size - at
                at -= len(piece)
            size -= len(piece)
        return size

    def _check(self, params: SamplingParams) -> None:
        for token in params.stop_token_ids:
            if token >= self._vocab_size:
                raise InvalidField("stop_token_ids", token, f"ids from 0 to {self._vocab_size - 1}")
        if params.stop and not self._has_text:
            raise InvalidField("stop", params.stop, "none: the model has no tokenizer, so no text to search")

    def _add(self, key: _StopSet) -> None:
        if not self._free:
            self._free = list(range(2 * len(self._masks) - 1, len(self._masks) - 1, -1))
            self._masks = np.concatenate([self._masks, np.zeros_like(self._masks)])
        set_id = self._free.pop()
        row = self._masks[set_id]
        row[:] = 0
        if not key.ignore_eos:
            row[self._eos_ids] |= END
        row[list(key.token_ids)] |= STOP_ID
        for tokens in map(self._completing_tokens, key.strings):
            row[tokens.spanning] |= MAYBE_STRING
            row[tokens.within] |= MAYBE_STRING | WITHIN
        self._ids[key] = set_id
        self._sets[set_id] = key
        self._stops[set_id] = sorted((stop.encode() for stop in key.strings), key=len, reverse=True)
        self._prefilter.put(set_id, self._stops[set_id])
        self._users[set_id] = 0

    def _completing_tokens(self, stop: str) -> CompletingTokens:
        if stop not in self._completing:
            self._completing[stop] = self._index.completing(stop.encode())
            if len(self._completing) > CACHED_STRINGS:
                self._completing.popitem(last=False)
        self._completing.move_to_end(stop)
        return self._completing[stop]


def _ends_in(before: bytes, last: bytes, stops: Sequence[bytes]) -> Iterator[tuple[int, int, bytes]]:
    """Yield each string that ends in `last`, after its index in `before + last` and the number of bytes behind it."""
    text = before + last
    for stop in stops:
        at = text.find(stop, max(0, len(before) - len(stop) + 1))  # skip ends before `last`
        if at >= 0:
            yield at, len(text) - at - len(stop), stop

"""StopSets: what ends a sample, as one row of flags a distinct set, looked up for a whole step at once.

Legend: V vocabulary, S rows of the mask matrix, n tokens of a step.

Whether a token may complete a stop string is known beforehand (`EndingIndex`). Most that may do not, since
the string's beginning is not before them: a few bytes of all flagged samples at once tell (`StopStringPrefilter`). Only
the others are searched, and only at their end. Stop strings are searched in the bytes of the pieces of all
generated tokens, special tokens' content included; and where there are such, in the text without it, too, which is what
clients see.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from tok_core.errors import InvalidField
from tok_core.manager.stops.stop_prefilter import Bools, StopStringPrefilter, TokenRows
from tok_core.sampling_params import SamplingParams
from tok_core.text import EndingIndex, Endings, PieceBytes

Int32s = npt.NDArray[np.int32]

END = 1  # one of the model's own end ids
STOP_ID = 2  # one of the request's stop_token_ids
MAYBE_STRING = 4  # may complete one of the request's stop strings: ask `find`
WITHIN = 8  # may do so whatever the bytes before it are; without it, ask `possible` first

CACHED_STRINGS = 256


class StopHit(msgspec.Struct, frozen=True):
    """A stop string that was completed.

    token_count  tokens of the sample, the completing one included
    cut          bytes of the pieces of all these tokens that lie before the stop string
    """

    stop: str
    token_count: int
    cut: int


class _StopSet(msgspec.Struct, frozen=True):
    ignore_eos: bool
    token_ids: frozenset[int]
    strings: frozenset[str]


class StopSets:
    """Interns sets of what ends a sample; equal ones share an id, which is a row of the mask matrix.

    vocab_size  V: token ids the model can make
    eos_ids     the model's own end ids; those from V on cannot be made and are left out
    pieces      bytes of each token id, missing ones taken as empty; None without a tokenizer
    hidden_ids  ids of special tokens, which are not shown
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
        self._completing: OrderedDict[str, Endings] = OrderedDict()
        self._masks = np.zeros((4, vocab_size), np.uint8)
        self._hidden = frozenset(token for token in hidden_ids if token < vocab_size and self._pieces[token])
        self._prefilter = StopStringPrefilter(arrays, len(self._masks), self._hidden)
        self._free = list(range(len(self._masks)))[::-1]
        self._ids: dict[_StopSet, int] = {}
        self._sets: dict[int, _StopSet] = {}
        self._stops: dict[int, list[bytes]] = {}
        self._users: dict[int, int] = {}

    def acquire(self, params: SamplingParams) -> int:
        """Id of what ends a sample of `params`; hand it back by `release`, once each time.

        Errors: InvalidField for stop strings without a tokenizer or that are no Unicode, and for
        stop_token_ids outside of the vocabulary; nothing is acquired then.
        """
        key = _StopSet(params.ignore_eos, frozenset(params.stop_token_ids), frozenset(params.stop))
        if key not in self._ids:
            self._check(params)
            self._add(key)
        set_id = self._ids[key]
        self._users[set_id] += 1
        return set_id

    def release(self, set_id: int) -> None:
        """One user of `set_id` less; its row is used anew when there are none."""
        self._users[set_id] -= 1
        if self._users[set_id] == 0:
            del self._ids[self._sets.pop(set_id)], self._stops[set_id], self._users[set_id]
            self._free.append(set_id)

    def classify(self, set_ids: Int32s, tokens: Int32s) -> npt.NDArray[np.uint8]:
        """Flags uint8 [n] of each row's new token under its set: END, STOP_ID, MAYBE_STRING and WITHIN, or 0."""
        places = set_ids.astype(np.int64) * self._vocab_size + tokens
        return self._masks.reshape(-1).take(places)

    def possible(self, set_ids: Int32s, rows: TokenRows) -> Bools:
        """Bool [n]: whether to ask `find` about rows flagged MAYBE_STRING and not WITHIN. False is certain."""
        return self._prefilter.possible(set_ids, rows)

    def find(self, set_id: int, tokens: Int32s) -> StopHit | None:
        """The stop string of `set_id` that the last of `tokens` completes; `tokens` are all of the sample.

        Of several, the one that ends first; of those that end at the same byte, the longest.
        """
        stops = self._stops[set_id]
        size = int(self._sizes[tokens].sum())
        last = self._pieces[tokens[-1]]
        before, count = self._end(tokens[:-1], len(stops[0]) - 1)
        found = [(-behind, size - behind - len(stop), stop) for _, behind, stop in _ends_in(before, last, stops)]
        if int(tokens[-1]) not in self._hidden and not self._hidden.isdisjoint(tokens[-1 - count : -1].tolist()):
            shown, count = self._end(tokens[:-1], len(stops[0]) - 1, self._hidden)
            recent = tokens[-1 - count :].tolist()
            found += [
                (-behind, size - self._size_from(recent, at), stop) for at, behind, stop in _ends_in(shown, last, stops)
            ]
        if not found:
            return None
        _, cut, stop = min(found)
        return StopHit(stop.decode(), len(tokens), cut)

    def _end(self, tokens: Int32s, size: int, hidden: Collection[int] = ()) -> tuple[bytes, int]:
        """Return the last pieces, `hidden` ones left out, that have `size` bytes, and the number of their tokens."""
        end, at = b"", len(tokens)
        while len(end) < size and at:
            at -= 1
            if (token := int(tokens[at])) not in hidden:
                end = self._pieces[token] + end
        return end, len(tokens) - at

    def _size_from(self, tokens: Sequence[int], at: int) -> int:
        """Return how many bytes of all pieces lie behind the shown byte number `at`, and with it."""
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
        for endings in map(self._endings, key.strings):
            row[endings.border] |= MAYBE_STRING
            row[endings.within] |= MAYBE_STRING | WITHIN
        self._ids[key] = set_id
        self._sets[set_id] = key
        self._stops[set_id] = sorted((stop.encode() for stop in key.strings), key=len, reverse=True)
        self._prefilter.put(set_id, self._stops[set_id])
        self._users[set_id] = 0

    def _endings(self, stop: str) -> Endings:
        if stop not in self._completing:
            self._completing[stop] = self._index.completing(stop.encode())
            if len(self._completing) > CACHED_STRINGS:
                self._completing.popitem(last=False)
        self._completing.move_to_end(stop)
        return self._completing[stop]


def _ends_in(before: bytes, last: bytes, stops: Sequence[bytes]) -> Iterator[tuple[int, int, bytes]]:
    """Yield the place in `before + last`, and the bytes behind, of each string that first ends in `last`."""
    text = before + last
    for stop in stops:
        at = text.find(stop, max(0, len(before) - len(stop) + 1))  # none that ended before the last token
        if at >= 0:
            yield at, len(text) - at - len(stop), stop

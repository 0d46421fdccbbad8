"""Find the sequences that their new tokens end: by an end id, a stop string or their limit."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from tok_core.manager.faults import Faults
from tok_core.manager.sequences import SequenceTable
from tok_core.manager.stops import END, MAYBE_STRING, STOP_ID, WITHIN, StopSets, TokenRows
from tok_core.messages import EMPTY, Finished, Int32, Int64


class Ends(NamedTuple):
    """Sequences that end, n of them.

    slots     int64 [n]
    known     int32 [n], tokens of each, with the one that ends it
    by_stop   bool [n], whether each ends by a stop and not by length
    finished  the report of each
    """

    slots: Int64
    known: Int32
    by_stop: np.ndarray
    finished: list[Finished]

    def first(self) -> Ends:
        """Return the first end of each sequence."""
        rows = np.sort(np.unique(self.slots, return_index=True)[1])
        finished = [self.finished[row] for row in rows.tolist()]
        return Ends(self.slots[rows], self.known[rows], self.by_stop[rows], finished)


class EndFinder:
    """Search for the ends of sequences in `table`; it changes nothing but `faults`."""

    def __init__(self, table: SequenceTable, stops: StopSets, faults: Faults) -> None:
        self._table = table
        self._stops = stops
        self._faults = faults

    def find(self, slots: Int64, known: Int32, token: Int32) -> Ends:
        """Find the sequences among `slots` that their new token ends.

        A request for which the search raises is at fault; its sequences do not end here.

        known  number of the sequence's tokens, with the new one
        """
        try:
            return self._find(slots, known, token)
        except Exception:
            found = []
            for rid in np.unique(self._table.rid[slots]).tolist():
                own = self._table.rid[slots] == rid
                try:
                    found.append(self._find(slots[own], known[own], token[own]))
                except Exception as error:
                    self._faults.add(rid, error)
            return _join(found)

    def _find(self, slots: Int64, known: Int32, token: Int32) -> Ends:
        """Like `find`, but raises and changes nothing."""
        table = self._table
        flags = self._stop_flags(slots, known, token)
        at_limit = known >= table.limit[slots]
        may_end = ((flags != 0) | at_limit).nonzero()[0]
        if not flags.any():  # the common case
            ending = slots[may_end], known[may_end]
            return Ends(*ending, np.zeros(len(may_end), np.bool_), self.by_length(*ending))
        rows = zip(*(column[may_end].tolist() for column in (slots, known, token, flags, at_limit)), strict=True)
        finished = [self._finished(slot, size, new, flag, at_limit=full) for slot, size, new, flag, full in rows]
        may_end = may_end[np.array([one is not None for one in finished], np.bool_)]
        found = [one for one in finished if one is not None]
        return Ends(
            slots[may_end], known[may_end], np.array([one.reason != "length" for one in found], np.bool_), found
        )

    def _stop_flags(self, slots: Int64, known: Int32, token: Int32) -> np.ndarray:
        """Return the flags of `StopSets.classify` for new tokens that may end their sequence; 0 if they cannot.

        Flags of tokens before `min_tokens` are 0. MAYBE_STRING is cleared where the bytes before rule out a match.
        """
        table = self._table
        flags = self._stops.classify(table.stop_set[slots], token)
        flags = np.where(known > table.unstopped_length[slots], flags, 0)
        to_check = (flags & (MAYBE_STRING | WITHIN) == MAYBE_STRING).nonzero()[0]
        if len(to_check):
            of = slots[to_check]
            rows = TokenRows(table.tokens, of, table.prompt_len[of], known[to_check] - 1)
            impossible = to_check[~self._stops.possible(table.stop_set[of], rows)]
            flags[impossible] &= END | STOP_ID
        return flags

    def _finished(self, slot: int, known: int, token: int, flags: int, *, at_limit: bool) -> Finished | None:
        """Return the report of the slot's sequence if its new token ends it; None if it does not."""
        table = self._table
        first = int(table.prompt_len[slot])
        whose = int(table.rid[slot]), int(table.sample[slot])
        # A stop string that ends with an end token still has to be cut from the text.
        if flags & MAYBE_STRING:
            hit = self._stops.find(int(table.stop_set[slot]), table.tokens[slot, first:known])
            if hit is not None:
                return Finished(*whose, "stop", known - first, hit.stop, hit.cut)
        if flags & (END | STOP_ID):
            return Finished(*whose, "stop", known - first, None if flags & END else token)
        return Finished(*whose, "length", known - first) if at_limit else None

    def by_length(self, slots: Int64, known: Int32) -> list[Finished]:
        """Return the reports of sequences that end by length, with `known` tokens."""
        table = self._table
        columns = table.rid[slots], table.sample[slots], known - table.prompt_len[slots]
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [Finished(rid, sample, "length", tokens) for rid, sample, tokens in rows]


NO_ENDS: Final = Ends(np.empty(0, np.int64), EMPTY, np.zeros(0, np.bool_), [])


def _join(found: list[Ends]) -> Ends:
    slots, known, by_stop, finished = zip(NO_ENDS, *found, strict=True)
    joined = np.concatenate(slots), np.concatenate(known), np.concatenate(by_stop)
    return Ends(*joined, [end for ends in finished for end in ends])

"""Take slots and pages back: from sequences that have ended, from cancelled requests, and by preemption."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tok_core.manager.admission import SequenceStarter
from tok_core.manager.faults import Faults
from tok_core.manager.grammar_manager import GrammarManager
from tok_core.manager.kv_cache import PreemptionPolicy
from tok_core.manager.requests import Accounts, Request
from tok_core.manager.sequences import State
from tok_core.messages import Int64


class Reclaimer:
    """Takes slots and pages back, and counts preemptions.

    preemptions  sequences preempted so far
    shortages    sequences among them that were preempted because no pages were left
    """

    def __init__(
        self,
        starter: SequenceStarter,
        accounts: Accounts,
        grammars: GrammarManager,
        preemption: PreemptionPolicy,
        faults: Faults,
    ) -> None:
        self.preemptions = 0
        self.shortages = 0
        self._table = starter.table
        self._paging = starter.paging
        self._starter = starter
        self._pending_forks = starter.pending_forks
        self._retained_prompts = starter.retained_prompts
        self._accounts = accounts
        self._grammars = grammars
        self._preemption = preemption
        self._faults = faults
        self._ended: list[Int64] = []  # slots whose sequences have ended but that still hold pages

    def release(self, slots: Int64) -> None:
        """Mark sequences as ended, whether finished or cancelled; `settle` frees their slots and pages.

        Preempted sequences hold no pages, so their slots are freed at once.
        """
        for slot in slots.tolist() if self._pending_forks else ():
            request, forks = self._table.requests[slot], self._pending_forks.pop(slot, None)
            if forks is not None and request is not None:
                request.hold(-len(forks))
        for slot in slots.tolist() if self._table.matchers else ():
            if (matcher := self._table.matchers.pop(slot, None)) is not None:
                self._grammars.end(matcher)
        if not len(slots):
            return
        holding = self._table.state[slots] != State.PREEMPTED
        self._table.free(slots[~holding])
        self._table.end(slots[holding])
        self._ended.append(slots[holding])

    def settle(self) -> None:
        """Free the slots and pages of ended sequences; full pages stay cached."""
        if self._ended:
            slots, self._ended = np.concatenate(self._ended), []
            self._paging.release_all_pages(slots)
            self._table.free(slots)

    def close(self, request: Request) -> None:
        """Remove the request, whose samples have all ended, from its caller's account."""
        self._accounts.close(request)

    def cancel(self, request: Request) -> None:
        """Release the slots, pages and retained prompt of the request. Its waiting samples stay in the queue."""
        self.close(request)
        self.release(np.array(list(request.slots.values()), np.int64))
        self._retained_prompts.drop(request.rid)

    def free_pages(self, count: int) -> bool:
        """Free pages until `count` are, if possible, and return whether they are.

        Pages of ended sequences are taken before cached pages are evicted.
        """
        if count > self._paging.allocator.free:
            self.settle()
        return self._paging.evict_until_free(count)

    def free_pages_for_class(self, count: int, priority: int, spared: Int64) -> None:
        """Free `count` pages, if possible, by evicting retained prompts and preempting slots of classes below this one.

        spared  slots that are not preempted
        """
        while not (free := self.free_pages(count)) and self._retained_prompts.drop_lowest_ranked(priority):
            pass
        for slot in () if free else self.rank_below(priority, spared):
            self.preempt_for_slots([slot])
            if self.free_pages(count):
                return

    def rank_below(self, priority: int, spared: Int64) -> list[int]:
        """Return running slots of lower classes without those `spared`, the first to be preempted first."""
        running = self._table.active()
        running = running[self._table.priority[running] > priority]
        ranked: list[int] = self._preemption.rank(running[~np.isin(running, spared)])[0].tolist()
        return ranked

    def preempt_one_for_pages(self, slots: Int64) -> None:
        """Preempt the one of `slots` that the policy chooses because no pages are left."""
        self.preempt_for_pages(self._preemption.choose(slots))

    def preempt_for_pages(self, slot: int) -> None:
        """Preempt a sequence because no pages are left."""
        self.shortages += 1
        request = self._table.requests[slot]
        assert request is not None
        request.preempted.add(int(self._table.sample[slot]))
        self._preempt(slot)

    def preempt_for_slots(self, slots: Iterable[int]) -> None:
        """Preempt sequences whose slots other samples are to get."""
        for slot in slots:
            request = self._table.requests[slot]
            assert request is not None
            request.displaced.add(int(self._table.sample[slot]))
            self._preempt(slot)

    def _preempt(self, slot: int) -> None:
        """Release a sequence's pages; requeue it at once, or when its last scheduled token is back."""
        self.preemptions += 1
        table = self._table
        known = table.known[slot] > table.length[slot] and not table.held[slot]  # held: its grammar may append tokens
        complete = table.state[slot] == State.PREFILL or known
        self._paging.release_all_pages(np.array([slot]))
        table.state[slot] = State.PREEMPTED
        if complete:
            self.requeue(slot)

    def requeue(self, slot: int) -> None:
        """Put a preempted sequence, all of whose tokens are known, back into the queue."""
        rid = int(self._table.rid[slot])
        try:
            self._starter.requeue(slot)
        except Exception as error:
            self._faults.add(rid, error)

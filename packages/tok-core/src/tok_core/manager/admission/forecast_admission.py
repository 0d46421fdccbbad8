"""Admit samples by a forecast of page use, so that memory is full but not overfull later."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

import numpy as np

from tok_core.manager.admission.fair_shares import MAX_TURNS, StartTurn, Turns
from tok_core.manager.admission.forecast import PageDemand, Reserve, admissible
from tok_core.manager.admission.length_model import LengthModel
from tok_core.manager.admission.page_reserves import PageWatermark, StaggeredAdmission
from tok_core.manager.admission.sequence_starter import SequenceStarter
from tok_core.manager.faults import FaultyRequest
from tok_core.manager.requests import Pending
from tok_core.manager.sequences import State
from tok_core.messages import Float64, Int64

GOLDEN = 0.6180339887498949  # golden ratio − 1
MAX_COPIES = 16  # copies of each sequence, with another predicted length each, if few run: this reduces the noise
MAX_FORECAST_SEQUENCES = 2048  # sequences, copies included, up to which copies are made: more would be too expensive
MAX_LATER_ENTRIES = 2048  # queue entries, the first ones, that represent later samples
MAX_TYPICAL_ENTRIES = 256  # of these, entries used, spread evenly; with fewer, the curve varies where requests differ
TYPICAL_SAMPLES = 2048  # samples that these entries are expanded to, each with a predicted length of its own
MAX_LEARNING_SAMPLES = 256  # samples that must finish, beyond as many as run, before lengths count as known
UNLEARNED_PAGE_SHARE = 0.7  # share of the pages in which samples start until then


class Samples(NamedTuple):
    """Samples whose remaining lengths are to be predicted: int64 [n] each.

    length          tokens that a sample has now
    prompt          tokens of its prompt
    limit           tokens that it has at most when it ends
    certain_length  tokens that it has at least when it ends
    shared          pages that are counted elsewhere
    """

    length: Int64
    prompt: Int64
    limit: Int64
    certain_length: Int64
    shared: Int64

    def repeated(self, times: int | Int64) -> Samples:
        """Return each sample `times` times in a row; an array gives the number for each of them."""
        return Samples(*(np.repeat(column, times) for column in self))

    def unending(self) -> PageDemand:
        """Return the demand if no sample ends before its limit."""
        return PageDemand(self.length, self.limit - self.length, self.shared)


class ForecastAdmission:
    """Admission by a forecast of page use over time from predicted lengths: as many samples start as memory holds."""

    def __init__(self, starter: SequenceStarter, lengths: LengthModel) -> None:
        self.starter = starter
        self.table = starter.table
        self.paging = starter.paging
        self.lengths = lengths
        self.stagger = StaggeredAdmission()
        self.watermark = PageWatermark()

    def observe(self, computed: int, recomputed: int) -> None:
        """Update the watermark with the tokens computed so far, and those of them that were computed twice."""
        running = self.table.length[self.table.in_state(State.DECODE)]
        each = float(running.mean()) if len(running) else 1.0
        self.watermark.observe(computed, recomputed, each, guessed=self._guesses(len(running)))

    def _guesses(self, running: int) -> bool:
        """Return whether too few samples have finished, relative to those running, for lengths to be known."""
        return self.lengths.finished <= running + min(running, MAX_LEARNING_SAMPLES)

    def count(
        self, turns: Turns, cycle: float, budget: int, priority: int | None = None
    ) -> tuple[int, list[StartTurn]]:
        """See `AdmissionPolicy`."""
        table = self.table
        slots, running, reserved = self.starter.startable(priority)
        if slots <= 0:
            return 0, []
        common = self.paging.depth_in_common(running)
        held = self._running(running, common, reserved)
        used = self._own_pages(held.length, held.shared)
        capacity = self._capacity(int((table.num_shared[running] - common).sum()), priority)
        samples, chosen = self._candidates(turns(slots), capacity - used, budget)
        fitting = len(samples.length)
        at_limits = self._own_pages(held.limit, held.shared) + self._own_pages(samples.limit, samples.shared)
        if at_limits > capacity:  # otherwise all fit even if all run to their limits and end at once
            guessed = self._guesses(len(running))
            stream = priority is None and not guessed and self._stream(capacity, cycle)
            fitting = self._fitting(held, samples, capacity, used, guessed=guessed, stream=stream)
        if priority is None:
            self.stagger.observe(used, capacity, waits=fitting < len(samples.length))
        return (fitting if len(running) else max(1, fitting)), chosen

    def _own_pages(self, length: Int64, shared: Int64) -> int:
        """Return how many pages of their own samples of these lengths have, all together."""
        return int((-(-length // self.paging.page_size) - shared).sum())

    def _fitting(
        self, held: Samples, samples: Samples, capacity: int, used: int, *, guessed: bool, stream: bool
    ) -> int:
        """Return how many of the samples fit into `capacity` pages beside those `held`, by predicted lengths.

        `used`: pages that those `held` have now. `guessed`, `stream`: as in `_guesses` and `_stream`.
        """
        count, size = len(held.length), self.paging.page_size
        times = min(MAX_COPIES, max(1, MAX_FORECAST_SEQUENCES // (count + 1)))
        if times > 1:
            held, samples = held.repeated(times), samples.repeated(times)
        running, candidates = self._predicted(held, 0), self._predicted(samples, len(held.length))
        room = int((UNLEARNED_PAGE_SHARE if guessed else 1) * capacity) * times
        reserve = self._reserve(capacity, times, used / max(count, 1), stream=stream)
        fitting = admissible(running, candidates, room, size, reserve, block_size=times)
        if guessed and fitting < len(samples.length):
            at_limits = admissible(held.unending(), samples.unending(), capacity * times, size, block_size=times)
            fitting = max(fitting, at_limits)
        return fitting // times

    def _reserve(self, capacity: int, times: int, each: float, *, stream: bool) -> Reserve:
        """Return the pages that samples starting now have to leave free, if all are counted `times` times.

        `each`: own pages of a running sequence. `stream`: pages for later samples are reserved, too.
        """

        def pages(moments: Int64) -> Int64:
            kept = times * self.watermark.pages(each, self.paging.num_pages, moments)
            return kept + self.stagger.reserve(capacity * times, moments) if stream else kept

        return pages

    def _stream(self, capacity: int, cycle: float) -> bool:
        """Return whether samples that start in `cycle` must leave pages for later ones like those that wait."""
        if not self.stagger.active:
            return False
        if self.stagger.outdated(cycle):
            self.stagger.compute_curve(cycle, self._typical(), self.paging.page_size)
        return self.stagger.fits_stream(capacity)

    def _capacity(self, freed: int, priority: int | None = None) -> int:
        """Return the pages that sequences may have of their own.

        freed     pages of the tree that only one running sequence holds each: they count as its own
        priority  lower classes than this one give up what they hold; None: no class does
        """
        table, draining = self.table, self.table.in_state(State.DRAIN)
        locked, tails = int(self.paging.locked), self.starter.retained_prompts.tails
        if priority is not None:
            draining = draining[table.priority[draining] <= priority]
            nodes, tails = self.starter.retained_prompts.held(priority)
            holding = (table.state != State.FREE) & (table.num_pages > 0) & (table.priority <= priority)
            locked = self.paging.tree.pages_down_to(np.concatenate((table.node[holding], nodes)))
        own = table.num_pages[draining] - table.num_shared[draining]
        return self.paging.num_pages - (locked + tails + int(own.sum()) - freed)

    def _running(self, slots: Int64, shared: Int64, reserved: dict[int, int]) -> Samples:
        """Return the running samples, and the forks of prefilling leaders that are still to come."""
        table = self.table
        length = np.maximum(table.length[slots], table.target[slots]).astype(np.int64)
        columns = table.prompt_len, table.limit, table.certain_length
        prompt, limit, certain_length = (column[slots].astype(np.int64) for column in columns)
        samples = Samples(length, prompt, limit, certain_length, shared)
        if reserved:
            each, shared_by_each = self._with_forks(slots, reserved, length, shared)
            samples = samples.repeated(each)._replace(shared=shared_by_each)
        return samples

    def _predicted(self, samples: Samples, before: int) -> PageDemand:
        """Return the predicted demand of the samples.

        `before`: number of samples predicted before these; the shares continue after theirs.
        """
        remaining = self._remaining(samples, _shares(before, len(samples.length)))
        return PageDemand(samples.length, remaining, samples.shared)

    def _remaining(self, samples: Samples, shares: Float64) -> Int64:
        """Return the remaining tokens of each sample at a quantile of its own, `shares`; at least its known minimum."""
        length, prompt, limit, certain_length, _ = samples
        remaining = self.lengths.remaining(length - prompt, limit - prompt, shares)
        surely: Int64 = np.maximum(remaining, certain_length - length)
        return surely

    def _typical(self) -> PageDemand:
        """Return the predicted demand of TYPICAL_SAMPLES typical later samples."""
        waiting = self.starter.waiting
        every = -(-min(len(waiting), MAX_LATER_ENTRIES) // MAX_TYPICAL_ENTRIES)
        spread = list(islice(waiting, 0, MAX_LATER_ENTRIES, every))
        until = np.cumsum([len(pending.samples) for pending in spread])
        entry = np.searchsorted(until, (np.arange(TYPICAL_SAMPLES) + 0.5) / TYPICAL_SAMPLES * until[-1])
        rows = np.array([self._row(pending) for pending in spread], np.int64)
        return self._predicted(Samples(*rows[entry].T), 0)

    def _row(self, pending: Pending) -> tuple[int, int, int, int, int]:
        """Return the row of `Samples` of each of these samples, with the pages that most of them share."""
        try:
            costs = self.starter.costs(pending, len(pending.samples))
            return *_known(pending), costs.first if len(pending.samples) == 1 else costs.others
        except Exception as error:
            raise FaultyRequest(pending.request.rid, error) from error

    def _with_forks(self, slots: Int64, reserved: dict[int, int], length: Int64, shared: Int64) -> tuple[Int64, Int64]:
        """Return how many sequences each of `slots` stands for, itself first, and the shared pages of each sequence."""
        forks = np.zeros(self.table.slots, np.int64)
        forks[list(reserved)] = list(reserved.values())
        forks = forks[slots]
        whole = np.where(forks > 0, length // self.paging.page_size, shared)
        times = forks + 1
        first = np.cumsum(times) - times  # the leader itself, before its forks
        repeated = np.repeat(whole, times)
        repeated[first] = shared
        return times, repeated

    def refresh(self) -> None:
        """Update the length model with how far the running sequences are now."""
        table = self.table
        slots = table.active()
        prompt, known, limit = table.prompt_len[slots], table.known[slots], table.limit[slots]
        columns = (table.followed[slots], known - prompt, limit - prompt)
        seen, generated, most = (column.astype(np.int64) for column in columns)
        self.lengths.follow(seen, generated, most)
        table.followed[slots] = generated

    def _candidates(self, turns: Iterable[StartTurn], room: int, budget: int) -> tuple[Samples, list[StartTurn]]:
        """Return the samples whose turn it is, and their turns.

        The last turn is the first that `room` pages cannot hold even before any sequence grows, or that uses up
        `budget`, the tokens left in the step.
        """
        rows, chosen = [], []
        for turn in islice(turns, MAX_TURNS):
            pending, here = turn
            chosen.append(turn)
            try:
                pages = -(-len(pending.tokens) // self.paging.page_size)
                first, others, computed = self.starter.costs(pending, here)
                rows.append((here, first, *_known(pending), others))
            except Exception as error:
                raise FaultyRequest(pending.request.rid, error) from error
            room -= here * (pages - others) + others - first
            budget -= computed
            if room < 0 or budget <= 0:
                break
        counts, firsts, *columns = np.array(rows, np.int64).reshape(-1, 7).T
        found = Samples(*columns).repeated(counts)
        found.shared[np.cumsum(counts) - counts] = firsts
        return found, chosen


def _known(pending: Pending) -> tuple[int, int, int, int]:
    """Return the first four columns of `Samples` for each of these samples."""
    request = pending.request
    return len(pending.tokens), len(request.prompt), request.limit, request.certain_length


def _shares(first: int, count: int) -> Float64:
    """Return shares in [0, 1) that are spread evenly over any range of numbers: multiples of `GOLDEN` (Weyl 1916)."""
    multiples = np.arange(first, first + count, dtype=np.float64) * GOLDEN + 0.5
    shares: Float64 = multiples - np.floor(multiples)  # equals `np.mod(multiples, 1)` in a tenth of the time
    return shares

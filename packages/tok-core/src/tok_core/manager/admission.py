"""Admission: how many waiting samples may start now, so that memory is full but not overfull later."""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np

from tok_core.manager.forecast import Reserve, admissible
from tok_core.manager.lengths import Float64, LengthModel
from tok_core.manager.pace import Pace
from tok_core.manager.paging import Paging
from tok_core.manager.queue import WaitingQueue
from tok_core.manager.sequences import Pending, SequenceTable, State
from tok_core.manager.slow_start import SlowStart
from tok_core.manager.stems import Stems
from tok_core.messages import Int64

LOOK_AHEAD = 512  # groups of samples in the queue that are considered a step
GOLDEN = 0.6180339887498949
TIMES = 8  # that a sequence is counted, of another further length each, where few run: chance weighs less
MANY = 512  # sequences of which that would be too dear
TYPICAL = 8  # candidates that later ones are taken to be like
QUANTILES = (np.arange(64) + 0.5) / 64  # of their further lengths
HEADROOM = 2.0  # sequences' worth of pages that is kept for lengths that were predicted too short
LEAST, MOST = 0.005, 0.04  # shares of the pages between which that is


class Demand(NamedTuple):
    """What sequences need: int64 [n] each. `left`: tokens until their limit, where `remaining` are to be expected."""

    length: Int64
    remaining: Int64
    shared: Int64
    left: Int64

    def unending(self) -> Demand:
        """The same if nobody ends before its limit."""
        return self._replace(remaining=self.left)


class Samples(NamedTuple):
    """Samples whose further lengths are to be predicted: int64 [n] each."""

    length: Int64
    prompt: Int64
    limit: Int64
    family: Int64
    shared: Int64


class Admission:
    """Forecasts page use over future time from predicted lengths, and admits as many as stay below the capacity."""

    def __init__(self, table: SequenceTable, paging: Paging, lengths: LengthModel, stems: Stems) -> None:
        self.table = table
        self.paging = paging
        self.lengths = lengths
        self.stems = stems
        self.pace = Pace()
        self.slow_start = SlowStart()

    def count(self, waiting: WaitingQueue, reserved: dict[int, int], step: float) -> int:
        """How many of the waiting samples may start in `step`, in their order.

        `reserved` says how many forks each prefilling leader (by slot) still has to come: they count as running.
        """
        table = self.table
        slots = table.free_slots - sum(reserved.values())
        if slots <= 0 or not waiting:
            return 0
        running = np.concatenate((table.in_state(State.PREFILL), table.in_state(State.DECODE)))
        common = self.paging.depth_in_common(running)
        count = len(running) + sum(reserved.values())
        times = min(TIMES, max(1, MANY // (count + 1)))
        demand = self._running(running, common, reserved, times)
        used = int((-(-demand.length // self.paging.page_size) - demand.shared).sum()) // times
        capacity = self._capacity(int((table.num_shared[running] - common).sum()), used / max(count, 1))
        samples = self._candidates(waiting, slots, capacity - used)
        few = self.slow_start.binds(self.lengths.finished, len(running))
        candidates = self._predicted(samples, times, count * times)
        reserve = None if few else self._reserve(samples, capacity, times, step)
        fitting = self._fitting(demand, candidates, capacity * times, reserve) // times
        if few and fitting:
            sure = self._fitting(demand.unending(), candidates.unending(), capacity * times, None) // times
            fitting = self.slow_start.allow(fitting, sure)
        self.pace.observe(used, capacity, waits=fitting * times < len(candidates.length))
        return fitting if len(running) else max(1, fitting)

    def _reserve(self, samples: Samples, capacity: int, times: int, step: float) -> Reserve | None:
        """What those that start in `step` are to leave free for later ones like the first of `samples`."""
        if not self.pace.binds:
            return None
        if self.pace.outdated(step):
            self.pace.draw(step, *self._typical(samples), self.paging.page_size)
        return partial(self.pace.reserve, capacity * times) if self.pace.bears(capacity) else None

    def _fitting(self, demand: Demand, candidates: Demand, capacity: int, reserve: Reserve | None) -> int:
        return admissible(*demand[:3], *candidates[:3], capacity, self.paging.page_size, reserve)

    def _capacity(self, freed: int, own_pages: float) -> int:
        """Pages for sequences to have of their own, `freed` of which the tree holds for one sequence each.

        `own_pages`: that a sequence has. How far chance takes memory beyond the forecast goes with these, however many
        sequences there are: as far as it goes, so much faster does memory empty on its own.
        """
        draining = self.table.in_state(State.DRAIN)
        own = self.table.num_pages[draining] - self.table.num_shared[draining]
        held = self.paging.locked + self.stems.tails + int(own.sum()) - freed
        pages = self.paging.num_pages
        return pages - held - int(min(max(HEADROOM * own_pages, LEAST * pages), MOST * pages))

    def _running(self, slots: Int64, shared: Int64, reserved: dict[int, int], times: int) -> Demand:
        table = self.table
        length = np.maximum(table.length[slots], table.target[slots]).astype(np.int64)
        prompt, limit = (column[slots].astype(np.int64) for column in (table.prompt_len, table.limit))
        family = table.family[slots]
        if reserved:
            each, shared = self._with_forks(slots, reserved, length, shared)
            length, prompt, limit, family = (np.repeat(column, each) for column in (length, prompt, limit, family))
        return self._predicted(Samples(length, prompt, limit, family, shared), times, 0)

    def _predicted(self, samples: Samples, times: int, before: int) -> Demand:
        """What the samples need, each `times` times, of which so many stand `before` them."""
        length, prompt, limit, family, shared = (
            (np.repeat(column, times) for column in samples) if times > 1 else samples
        )
        shares = _shares(before, len(length))
        remaining = self.lengths.remaining(length - prompt, limit - prompt, family, shares)
        return Demand(length, remaining, shared, limit - length)

    def _typical(self, samples: Samples) -> tuple[Int64, Int64, Int64]:
        """Lengths, further tokens and shared pages of what later samples are like."""
        rows = tuple(column[:TYPICAL] for column in samples)
        length, prompt, limit, family, shared = (np.tile(column, len(QUANTILES)) for column in rows)
        shares = np.repeat(QUANTILES, len(rows[0]))
        return length, self.lengths.remaining(length - prompt, limit - prompt, family, shares), shared

    def _with_forks(self, slots: Int64, reserved: dict[int, int], length: Int64, shared: Int64) -> tuple[Int64, Int64]:
        """How many sequences each of `slots` stands for, itself first, and the shared pages of all of these."""
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
        """Tells the length model how far the running sequences are; without it, it knows them as they were."""
        table = self.table
        slots = np.concatenate((table.in_state(State.PREFILL), table.in_state(State.DECODE)))
        prompt, known, limit = table.prompt_len[slots], table.known[slots], table.limit[slots]
        seen, generated, most = table.followed[slots].astype(np.int64), known - prompt, limit - prompt
        self.lengths.follow(seen, generated, most)
        table.followed[slots] = generated
        self.lengths.families.run(table.family[slots], self.lengths.hazard(generated, most))

    def _candidates(self, waiting: WaitingQueue, most: int, room: int) -> Samples:
        """At most `most`, and none after the first that `room` pages cannot hold even before anybody grows."""
        rows = []
        for pending in islice(waiting, LOOK_AHEAD):
            request, tokens = pending.request, len(pending.tokens)
            here = min(len(pending.samples), most)
            pages, first, others = -(-tokens // self.paging.page_size), *self._shared_pages(pending)
            rows.append((here, first, tokens, len(request.prompt), request.limit, request.family, others))
            most -= here
            room -= here * (pages - others) + others - first
            if not most or room < 0:
                break
        samples, first, *columns = np.array(rows, np.int64).T
        length, prompt, limit, family, shared = (np.repeat(column, samples) for column in columns)
        shared[np.cumsum(samples) - samples] = first
        return Samples(length, prompt, limit, family, shared)

    def _shared_pages(self, pending: Pending) -> tuple[int, int]:
        """Pages of the first of the samples, and of each other, that are not its own.

        The first, where it has to prefill, shares what running sequences hold anyway; pages only cached count as its
        own. Others share the prompt's full pages with it, or, starting late, with what is kept of the prompt.
        """
        size, tokens = self.paging.page_size, pending.tokens
        if pending.fresh and self.stems.find(pending.request) is not None:
            return ((len(tokens) - 1) // size,) * 2
        if pending.fresh and pending.request.leader is not None:
            return (len(tokens) // size,) * 2
        return self.paging.tree.locked_depth(tokens[: (len(tokens) - 1) // size * size]), len(tokens) // size


def _shares(first: int, count: int) -> Float64:
    """Shares in [0, 1) that any stretch of numbers spreads evenly: multiples of the golden ratio (Weyl 1916)."""
    return np.mod(np.arange(first, first + count, dtype=np.float64) * GOLDEN + 0.5, 1.0)

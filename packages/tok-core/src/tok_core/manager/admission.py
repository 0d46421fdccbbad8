"""Admission: how many waiting samples may start now, so that memory is full but not overfull later."""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

import numpy as np

from tok_core.manager.forecast import admissible
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
QUANTILES = (np.arange(8) + 0.5) / 8  # of the further lengths that an expected cost is the mean over
HEADROOM = 0.02  # share of the pages kept for lengths that were predicted too short


class Demand(NamedTuple):
    """What sequences need: int64 [n] each. `left`: tokens until their limit, where `remaining` are to be expected."""

    length: Int64
    remaining: Int64
    shared: Int64
    left: Int64


class Admission:
    """Forecasts page use over future time from predicted lengths, and admits as many as stay below the capacity."""

    def __init__(self, table: SequenceTable, paging: Paging, lengths: LengthModel, stems: Stems) -> None:
        self.table = table
        self.paging = paging
        self.lengths = lengths
        self.stems = stems
        self.pace = Pace()
        self.slow_start = SlowStart()

    def count(self, waiting: WaitingQueue, reserved: dict[int, int], step: int) -> int:
        """How many of the waiting samples may start in `step`, in their order.

        `reserved` says how many forks each prefilling leader (by slot) still has to come: they count as running.
        """
        table = self.table
        slots = table.free_slots - sum(reserved.values())
        if slots <= 0 or not waiting:
            return 0
        running = np.concatenate((table.in_state(State.PREFILL), table.in_state(State.DECODE)))
        common = self.paging.depth_in_common(running)
        capacity, size = self._capacity(int((table.num_shared[running] - common).sum())), self.paging.page_size
        demand = self._running(running, common, reserved)
        used = int((-(-demand.length // size) - demand.shared).sum())
        candidates, cost = self._candidates(waiting, slots, capacity - used, len(running))
        fitting = admissible(*demand[:3], *candidates[:3], capacity, size)
        if self.slow_start.binds(self.lengths.finished, len(running)) and fitting:
            sure = (one._replace(remaining=one.left)[:3] for one in (demand, candidates))
            fitting = self.slow_start.allow(fitting, admissible(*next(sure), *next(sure), capacity, size))
        fitting = self.pace.allow(fitting, cost, capacity, used, step)
        return fitting if len(running) else max(1, fitting)

    def _capacity(self, freed: int) -> int:
        """Pages for sequences to have of their own, `freed` of which the tree holds for one sequence each."""
        draining = self.table.in_state(State.DRAIN)
        own = self.table.num_pages[draining] - self.table.num_shared[draining]
        held = self.paging.locked + self.stems.tails + int(own.sum()) - freed
        return self.paging.num_pages - held - int(self.paging.num_pages * HEADROOM)

    def _running(self, slots: Int64, shared: Int64, reserved: dict[int, int]) -> Demand:
        table = self.table
        self._follow(slots)
        length = np.maximum(table.length[slots], table.target[slots]).astype(np.int64)
        prompt, limit = (column[slots].astype(np.int64) for column in (table.prompt_len, table.limit))
        family = table.family[slots]
        if reserved:
            times, shared = self._with_forks(slots, reserved, length, shared)
            length, prompt, limit = (np.repeat(column, times) for column in (length, prompt, limit))
            family = np.repeat(family, times)
        remaining = self.lengths.remaining(length - prompt, limit - prompt, family, _shares(0, len(length)))
        return Demand(length, remaining, shared, limit - length)

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

    def _follow(self, slots: Int64) -> None:
        """Tells the length model how far the running sequences are."""
        table = self.table
        prompt, known, limit = table.prompt_len[slots], table.known[slots], table.limit[slots]
        seen, generated, most = table.followed[slots].astype(np.int64), known - prompt, limit - prompt
        self.lengths.follow(seen, generated, most)
        table.followed[slots] = generated
        self.lengths.families.run(table.family[slots], self.lengths.hazard(generated, most))

    def _candidates(self, waiting: WaitingQueue, most: int, room: int, running: int) -> tuple[Demand, Float64]:
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
        samples, first, length, prompt, limit, family, shared = np.array(rows, np.int64).T
        least = np.where(samples > 1, shared, first)
        cost = np.repeat(self._page_steps(length, prompt, limit, family, least), samples)
        length, prompt, limit = (np.repeat(column, samples) for column in (length, prompt, limit))
        family, shared = np.repeat(family, samples), np.repeat(shared, samples)
        shared[np.cumsum(samples) - samples] = first
        remaining = self.lengths.remaining(length - prompt, limit - prompt, family, _shares(running, len(length)))
        return Demand(length, remaining, shared, limit - length), cost

    def _page_steps(self, length: Int64, prompt: Int64, limit: Int64, family: Int64, shared: Int64) -> Float64:
        """Pages that a sample is expected to hold of its own, summed over the steps that it is expected to run."""
        times, size = len(QUANTILES), self.paging.page_size
        generated, most, kin = (np.tile(column, times) for column in (length - prompt, limit - prompt, family))
        shares = np.repeat(QUANTILES, len(length))
        steps = self.lengths.remaining(generated, most, kin, shares).reshape(times, -1)
        mean: Float64 = (steps * ((length + steps / 2 + size / 2) / size - shared)).mean(axis=0)
        return mean

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

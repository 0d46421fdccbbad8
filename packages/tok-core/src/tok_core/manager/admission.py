"""Admission: how many waiting samples may start now, so that memory is full but not overfull later."""

from __future__ import annotations

from itertools import islice

import numpy as np

from tok_core.manager.forecast import admissible
from tok_core.manager.lengths import LengthModel
from tok_core.manager.paging import Paging
from tok_core.manager.queue import WaitingQueue
from tok_core.manager.sequences import Pending, SequenceTable, State
from tok_core.manager.stems import Stems
from tok_core.messages import Int64

LOOK_AHEAD = 512  # groups of samples in the queue that are considered a step
HEADROOM = 0.02  # share of the pages kept for lengths that were predicted too short


class Admission:
    """Forecasts page use over future time from predicted lengths, and admits as many as stay below the capacity."""

    def __init__(self, table: SequenceTable, paging: Paging, lengths: LengthModel, stems: Stems) -> None:
        self.table = table
        self.paging = paging
        self.lengths = lengths
        self.stems = stems

    def count(self, waiting: WaitingQueue, reserved: dict[int, int]) -> int:
        """How many of the waiting samples may start, in their order.

        `reserved` says how many forks each prefilling leader (by slot) still has to come: they count as running.
        """
        table = self.table
        slots = table.free_slots - sum(reserved.values())
        if slots <= 0 or not waiting:
            return 0
        running = np.concatenate((table.in_state(State.PREFILL), table.in_state(State.DECODE)))
        demand, capacity, size = self._running(running, reserved), self._capacity(), self.paging.page_size
        room = capacity - int((-(-demand[0] // size) - demand[2]).sum())
        candidates = self._candidates(waiting, slots, room)
        fitting = admissible(*demand, *candidates, capacity, size)
        return fitting if len(running) else max(1, fitting)

    def _capacity(self) -> int:
        draining = self.table.in_state(State.DRAIN)
        own = self.table.num_pages[draining] - self.table.num_shared[draining]
        held = self.paging.locked + self.stems.tails + int(own.sum())
        return self.paging.num_pages - held - int(self.paging.num_pages * HEADROOM)

    def _running(self, slots: Int64, reserved: dict[int, int]) -> _Demand:
        table = self.table
        length = np.maximum(table.length[slots], table.target[slots]).astype(np.int64)
        prompt = table.prompt_len[slots].astype(np.int64)
        remaining = self.lengths.remaining(length - prompt, table.limit[slots] - prompt)
        shared = table.num_shared[slots].astype(np.int64)
        if not reserved:
            return length, remaining, shared
        forks = np.zeros(table.slots, np.int64)
        forks[list(reserved)] = list(reserved.values())
        forks = forks[slots]
        whole = np.where(forks > 0, length // self.paging.page_size, shared)
        times = forks + 1
        first = np.cumsum(times) - times  # the leader itself, before its forks
        repeated = np.repeat(whole, times)
        repeated[first] = shared
        return np.repeat(length, times), np.repeat(remaining, times), repeated

    def _candidates(self, waiting: WaitingQueue, most: int, room: int) -> _Demand:
        """At most `most`, and none after the first that `room` pages cannot hold even before anybody grows."""
        rows = []
        for pending in islice(waiting, LOOK_AHEAD):
            request, tokens = pending.request, len(pending.tokens)
            here = min(len(pending.samples), most)
            pages, first, others = -(-tokens // self.paging.page_size), *self._shared_pages(pending)
            rows.append((here, tokens, len(request.prompt), request.limit, first, others))
            most -= here
            room -= here * (pages - others) + others - first
            if not most or room < 0:
                break
        samples, length, prompt, limit, first, others = np.array(rows, np.int64).T
        remaining = np.repeat(self.lengths.remaining(length - prompt, limit - prompt), samples)
        shared = np.repeat(others, samples)
        shared[np.cumsum(samples) - samples] = first
        return np.repeat(length, samples), remaining, shared

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


_Demand = tuple[Int64, Int64, Int64]

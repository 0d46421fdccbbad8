"""Admission: how many waiting samples may start now, so that memory is full but not overfull later."""

from __future__ import annotations

import numpy as np

from tok_core.manager.forecast import admissible
from tok_core.manager.lengths import LengthModel
from tok_core.manager.paging import Paging
from tok_core.manager.queue import WaitingQueue
from tok_core.manager.sequences import SequenceTable, State
from tok_core.messages import Int64

LOOK_AHEAD = 512  # waiting samples considered a step
HEADROOM = 0.02  # share of the pages kept for lengths that were predicted too short


class Admission:
    """Forecasts page use over future time from predicted lengths, and admits as many as stay below the capacity."""

    def __init__(self, table: SequenceTable, paging: Paging, lengths: LengthModel) -> None:
        self.table = table
        self.paging = paging
        self.lengths = lengths

    def count(self, waiting: WaitingQueue, reserved: dict[int, int]) -> int:
        """How many of the waiting samples may start, in their order.

        `reserved` says how many forks each prefilling leader (by slot) still has to come: they count as running.
        """
        table = self.table
        slots = table.free_slots - sum(reserved.values())
        if slots <= 0 or not waiting:
            return 0
        running = np.flatnonzero((table.state == State.PREFILL) | (table.state == State.DECODE))
        demand, capacity, size = self._running(running, reserved), self._capacity(), self.paging.page_size
        room = capacity - int((-(-demand[0] // size) - demand[2]).sum())
        candidates = self._candidates(waiting, min(slots, LOOK_AHEAD), room)
        fitting = admissible(*demand, *candidates, capacity, size)
        return fitting if len(running) else max(1, fitting)

    def _capacity(self) -> int:
        draining = self.table.in_state(State.DRAIN)
        own = self.table.num_pages[draining] - self.table.num_shared[draining]
        held = self.paging.locked + int(own.sum())
        return self.paging.num_pages - held - int(self.paging.num_pages * HEADROOM)

    def _running(self, slots: Int64, reserved: dict[int, int]) -> _Demand:
        table = self.table
        length = np.maximum(table.length[slots], table.target[slots]).astype(np.int64)
        prompt = table.prompt_len[slots].astype(np.int64)
        remaining = self.lengths.remaining(length - prompt, table.limit[slots] - prompt)
        shared = table.num_shared[slots].astype(np.int64)
        if not reserved:
            return length, remaining, shared
        forks = np.array([reserved.get(int(slot), 0) for slot in slots])
        whole = np.where(forks > 0, length // self.paging.page_size, shared)
        times = forks + 1
        first = np.cumsum(times) - times  # the leader itself, before its forks
        repeated = np.repeat(whole, times)
        repeated[first] = shared
        return np.repeat(length, times), np.repeat(remaining, times), repeated

    def _candidates(self, waiting: WaitingQueue, most: int, room: int) -> _Demand:
        """At most `most`, and none after the first that `room` pages cannot hold even before anybody grows."""
        length: list[int] = []
        generated: list[int] = []
        limit: list[int] = []
        shared: list[int] = []
        for pending in waiting:
            request, tokens = pending.request, len(pending.tokens)
            here = min(len(pending.samples), most - len(length))
            limit += [request.limit - len(request.prompt)] * here
            length += [tokens] * here
            generated += [tokens - len(request.prompt)] * here
            shared += [self._shared_pages(pending.tokens)] + [tokens // self.paging.page_size] * (here - 1)
            room -= here * -(-tokens // self.paging.page_size) - sum(shared[-here:])
            if len(length) >= most or room < 0:
                break
        remaining = self.lengths.remaining(np.array(generated, np.int64), np.array(limit, np.int64))
        return np.array(length, np.int64), remaining, np.array(shared, np.int64)

    def _shared_pages(self, tokens: np.ndarray) -> int:
        """Pages of the prompt that running sequences hold anyway; pages only cached count as the candidate's own."""
        size = self.paging.page_size
        return self.paging.tree.locked_depth(tokens[: (len(tokens) - 1) // size * size])


_Demand = tuple[Int64, Int64, Int64]

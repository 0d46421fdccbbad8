"""Run many requests of every kind through a manager, and measure its memory.

`PYTHONPATH=tests python -m support.many_requests 1000000` prints the memory after every tenth of the requests.
"""

from __future__ import annotations

import gc
import sys
import time

import msgspec
import numpy as np
import psutil
from numpy.typing import NDArray

from support.schedules import engine_info
from tok_core import SamplingParams
from tok_core.messages import Cancel, Submit
from tok_server.bench.manager.simulation import Simulation

VOCAB, END = 512, 511
INFO = msgspec.structs.replace(
    engine_info(page_size=16, max_model_len=128, max_step_tokens=32_768),
    vocab_size=VOCAB,
    eos_token_ids=(END,),
)
STEM = np.arange(100, dtype=np.int32)
KINDS = 997  # distinct stop sets, more than the cache holds; prime, so that all kinds of requests combine


class ManyRequests:
    """Keeps 1.5 requests per slot open; prompts share stems, and samples end early, late, or by cancellation."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        pieces = [bytes([97 + i % 26, 97 + i // 26]) for i in range(VOCAB)]
        self.simulation = Simulation(
            msgspec.structs.replace(INFO, max_running=slots, num_pages=12 * slots), _short, pieces
        )
        self.finished = 0
        self._given = 0
        self._random = np.random.default_rng(0)

    def run(self, requests: int) -> None:
        """Run until `requests` more requests have finished or were cancelled."""
        manager, last = self.simulation.manager, self.finished + requests
        while self.finished < last:
            for _ in range(self._slots * 3 // 2 - len(manager.intake.requests)):
                self._submit(self._given)
                self._given += 1
            if self._random.random() < 0.5:
                self._cancel()
            self.simulation.turn()
            self.finished = self._given - len(manager.intake.requests)

    def end(self) -> None:
        """Run until no request is open and evict the cache; memory that remains is kept for ended requests."""
        manager = self.simulation.manager
        while manager.intake.requests or manager.output_processor.in_flight:
            self.simulation.turn()
        assert manager.paging.evict_until_free(manager.paging.num_pages)

    def _submit(self, rid: int) -> None:
        random = self._random
        prompt = np.concatenate((STEM[: random.integers(0, 100)], random.integers(0, END, 20, np.int32)))
        params = SamplingParams(
            n=(1, 1, 1, 1, 1, 1, 1, 4)[rid % 8],
            max_tokens=4,
            seed=rid,
            priority=rid % 37 % 3 * (rid % 1000),
            stop=(f"{rid % KINDS:x}",) if rid % 3 == 0 else (),
            stop_token_ids=(rid % KINDS % VOCAB,) if rid % 5 == 0 else (),
        )
        self.simulation.submit(Submit(rid, prompt, params))

    def _cancel(self) -> None:
        rids = list(self.simulation.manager.intake.requests)
        if rids:
            self.simulation.submit(Cancel(rids[int(self._random.integers(len(rids)))]))


def _short(u: NDArray[np.float64]) -> NDArray[np.int64]:
    return 1 + (u * 4).astype(np.int64)


def main(requests: int) -> None:
    """Print a line after every tenth of the requests."""
    many, process, began = ManyRequests(slots=2048), psutil.Process(), time.perf_counter()
    for _ in range(10):
        many.run(requests // 10)
        gc.collect()
        size = process.memory_info().rss / 2**20
        print(
            f"{many.finished:>10,d} finished: {size:8.1f} MiB resident, {len(gc.get_objects()):>9,d} objects tracked, "
            f"{time.perf_counter() - began:6.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main(int(sys.argv[1]))

"""Engines for tests: in one process, on tiny models, and checked to have given everything back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from support.patience import wait_until
from tok_core import Engine, EngineConfig
from tok_core.manager.loop import Manager
from tok_core.replicas.replica import ThreadReplica


def manager_of(core: object, replica_number: int = 0) -> Manager:
    """The manager of a replica of an engine that runs in this process."""
    replica = core._core._replica_set.records[replica_number].replica  # type: ignore[attr-defined]
    assert isinstance(replica, ThreadReplica)
    assert replica.manager is not None
    return replica.manager


def assert_all_given_back(manager: Manager) -> None:
    """No slot, page, lock or request is held once everything has ended; waits for the last steps to come back."""
    table, returns = manager.table, manager.output_processor
    wait_until(lambda: not manager.requests and not returns.in_flight and table.free_slots == table.slots)
    assert manager.paging.used == 0
    assert manager.paging.allocator.free + manager.paging.tree.pages == manager.paging.num_pages
    assert manager.paging.tree.evictable == manager.paging.tree.pages
    assert not manager.scheduler.waiting
    assert not manager.scheduler.pending_forks
    manager.paging.tree.check()


@contextmanager
def cpu_engine(path: Path, **options: Any) -> Iterator[Engine]:
    """An fp32 engine in this process."""
    settings: dict[str, Any] = {"kv_cache_tokens": 65_536, "max_running": 64, "dtype": "float32", "device": "cpu"}
    with Engine(EngineConfig(model=str(path), **{**settings, **options}), in_process=True) as engine:
        yield engine
        for number in range(settings.get("dp", 1)):
            assert_all_given_back(manager_of(engine, number))


def random_prompts(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    """Random token ids that are no special ones in tiny models."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 300, length).tolist() for length in lengths]

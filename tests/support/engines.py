"""Run engines in-process on tiny models, and check that they release everything."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from support.patience import wait_until
from support.prefix_trees import check_tree
from tok_core import AsyncEngine, Engine, EngineConfig
from tok_core.manager.loop import Manager
from tok_core.replicas.replica import ThreadReplica


def manager_of(core: object, replica_number: int = 0) -> Manager:
    """Return the manager of a replica of an in-process engine."""
    replica = core._core._replica_set.records[replica_number].replica  # type: ignore[attr-defined]
    assert isinstance(replica, ThreadReplica)
    assert replica.manager is not None
    return replica.manager


def assert_all_given_back(manager: Manager) -> None:
    """Wait for the last steps and check that no slot, page, lock or request is held."""
    table, returns = manager.table, manager.output_processor
    wait_until(lambda: not manager.intake.requests and not returns.in_flight and table.lendable_slots == table.slots)
    assert manager.paging.used == 0
    assert manager.paging.allocator.free + manager.paging.tree.pages == manager.paging.num_pages
    assert manager.paging.tree.evictable == manager.paging.tree.pages
    assert not manager.scheduler.waiting
    assert not manager.scheduler.starter.pending_forks
    check_tree(manager.paging.tree)


@contextmanager
def cpu_engine(path: Path, **options: Any) -> Iterator[Engine]:
    """Run an fp32 engine in this process; check at the end that it holds nothing."""
    settings: dict[str, Any] = {"kv_cache_tokens": 65_536, "max_running": 64, "dtype": "float32", "device": "cpu"}
    with Engine(EngineConfig(model=str(path), **{**settings, **options}), in_process=True) as engine:
        yield engine
        for number in range(settings.get("dp", 1)):
            assert_all_given_back(manager_of(engine, number))


@asynccontextmanager
async def async_engine(path: Path, *, in_process: bool = True, **options: Any) -> AsyncIterator[AsyncEngine]:
    """Run an fp32 engine on an event loop; in this process, check at the end that it holds nothing."""
    settings = {"kv_cache_tokens": 8192, "max_running": 8, "dtype": "float32", "device": "cpu", **options}
    engine = AsyncEngine(EngineConfig(model=str(path), **settings), in_process=in_process)
    await engine.start()
    try:
        yield engine
        if in_process:
            assert_all_given_back(manager_of(engine))
    finally:
        await engine.close()


def random_prompts(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    """Return prompts of random token ids, none of them special in tiny models."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 300, length).tolist() for length in lengths]

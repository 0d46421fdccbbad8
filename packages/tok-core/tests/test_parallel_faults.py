"""The death of one worker of a replica fails open requests at once, and all its workers are restarted."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from support.patience import PATIENCE, until
from support.tiny_models import make_model
from tok_core import AsyncEngine, EngineConfig, EngineDead, SamplingParams
from tok_core.replicas.replica import ProcessReplica

pytestmark = pytest.mark.usefixtures("forked_children")

LONG = SamplingParams(max_tokens=4000, temperature=0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


ON_GPUS = (
    ({"tp": 2}, "worker 0"),
    ({"tp": 4}, "worker 2"),
    ({"pp": 4}, "worker 1"),
    ({"pp": 4}, "worker 3"),
    ({"tp": 2, "pp": 2}, "worker 3"),
)


@pytest.mark.parametrize(("parallel", "killed"), [({"tp": 2}, "worker 1"), ({"pp": 2}, "worker 0")], ids=str)
async def test_killed_worker_fails_open_requests_soon_and_service_returns(
    tmp_path: Path, parallel: dict[str, int], killed: str
) -> None:
    await kill_under_load(tmp_path, "cpu", parallel, killed)


@pytest.mark.gpu
@pytest.mark.parametrize(("parallel", "killed"), ON_GPUS, ids=str)
async def test_killed_gpu_worker_fails_requests_with_ranks_in_a_collective(
    tmp_path: Path, parallel: dict[str, int], killed: str
) -> None:
    if torch.cuda.device_count() < math.prod(parallel.values()):
        pytest.skip(f"needs {math.prod(parallel.values())} CUDA devices")
    await kill_under_load(tmp_path, "cuda", parallel, killed)


async def kill_under_load(path: Path, device: str, parallel: dict[str, int], killed: str) -> None:
    """Kill a worker of an engine that generates; check its requests' errors, and that later ones are served."""
    model = make_model("qwen2", path / "qwen2", layers=4, max_positions=8192)
    config: dict[str, Any] = {"device": device, "dtype": "float32", "kv_cache_tokens": 98_304, **parallel}
    engine = AsyncEngine(EngineConfig(model=str(model), **config))
    await engine.start()
    try:
        expected = await engine.generate([1, 2, 3], SHORT).output()
        streams = [engine.generate([1, 2, 3 + i], LONG) for i in range(20)]
        assert (await anext(aiter(streams[0]))).token_ids
        replica = engine._core._replica_set.records[0].replica
        assert isinstance(replica, ProcessReplica)
        workers = math.prod(parallel.values())
        assert set(replica.children) == {"manager", *(f"worker {rank}" for rank in range(workers))}
        os.kill(replica.children[killed].pid, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE):  # the step timeout is longer
            results = await asyncio.gather(*(stream.output() for stream in streams), return_exceptions=True)
        assert all(isinstance(result, EngineDead) for result in results)
        await until(lambda: engine.health().state == "ready")
        again = await engine.generate([1, 2, 3], SHORT).output()
        assert again.outputs[0].token_ids == expected.outputs[0].token_ids
    finally:
        await engine.close()

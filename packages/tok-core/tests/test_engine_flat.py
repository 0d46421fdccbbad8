"""An engine holds no memory for requests that have ended, whether they were streamed, awaited or aborted."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from support.engines import assert_all_given_back, manager_of
from support.tiny_models import make_model
from tok_core import AsyncEngine, EngineConfig, SamplingParams

FIRST, MORE, TOGETHER = 3, 10, 250
TRIES = 3
MIN_LEAK_BYTES = 16  # bytes a request: a number in a list takes 36


@pytest.fixture
def _traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


async def serve(engine: AsyncEngine, number: int, prompt: list[int]) -> None:
    """Send a request whose options depend on `number`; await or abort it."""
    logprobs, samples = 1 if number % 5 == 0 else None, 1 + number % 2
    params = SamplingParams(max_tokens=4, n=samples, logprobs=logprobs, ignore_eos=True)
    stream = engine.generate(prompt, params, stream=number % 3 > 0)
    if number % 7:
        await stream.output()
        return
    async for _ in stream:
        break
    stream.abort()


async def held(engine: AsyncEngine) -> int:
    """Return the bytes that Python holds once the prefix cache is empty and no request is open."""
    manager = manager_of(engine)
    await asyncio.to_thread(assert_all_given_back, manager)
    assert manager.paging.evict_until_free(manager.paging.num_pages)
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@pytest.mark.usefixtures("_traced")
async def test_engine_memory_does_not_grow_with_finished_requests(tmp_path: Path) -> None:
    path, random = make_model("llama", tmp_path / "llama"), np.random.default_rng(0)
    options = {"device": "cpu", "dtype": "float32", "kv_cache_tokens": 65_536, "max_running": 256}
    engine = AsyncEngine(EngineConfig(model=str(path), **options), in_process=True)  # type: ignore[arg-type]
    await engine.start()

    async def serve_batches(count: int) -> int:
        for _ in range(count):
            prompts = random.integers(0, 300, (TOGETHER, 6)).tolist()
            await asyncio.gather(*(serve(engine, number, prompt) for number, prompt in enumerate(prompts)))
        return await held(engine)

    try:
        before = await serve_batches(FIRST)
        for _ in range(TRIES):  # a leak grows each time, the interpreter's own caches now and then
            after = await serve_batches(MORE)
            grown, before = after - before, after
            if grown < MIN_LEAK_BYTES * MORE * TOGETHER:
                return
        raise AssertionError(f"{grown} bytes more after {MORE * TOGETHER} requests")
    finally:
        await engine.close()

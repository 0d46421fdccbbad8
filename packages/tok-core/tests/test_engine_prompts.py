"""Prompt log-probabilities and embeddings equal transformers' in fp32, however the prompts are computed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from support.engines import assert_all_given_back, cpu_engine, manager_of, random_prompts
from support.patience import until
from support.paused_engine import gated
from support.tiny_models import make_model, reference_greedy, reference_logits, reference_model
from tok_core import (
    AsyncEngine,
    EmbeddingOutput,
    Engine,
    EngineConfig,
    InvalidField,
    Pooling,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)
from tok_core.worker import prompt_outputs

LENGTHS = (1, 2, 16, 17, 65, 200)
PROMPTS = random_prompts(LENGTHS)
SCORED = SamplingParams(max_tokens=0, prompt_logprobs=3)
SMALL_STEPS: dict[str, Any] = {"max_step_tokens": 21, "max_running": 21, "page_size": 4}
POOLINGS: tuple[Pooling, ...] = ("last", "mean")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prompts")


@pytest.fixture(params=["llama", "llama-untied", "qwen2", "qwen3"])
def path(request: pytest.FixtureRequest, directory: Path) -> Path:
    return model(directory, request.param)


@pytest.fixture
def engine(directory: Path) -> Iterator[Engine]:
    with cpu_engine(model(directory, "llama")) as one:
        yield one


def model(directory: Path, kind: str) -> Path:
    return directory / kind if (directory / kind).exists() else make_model(kind, directory / kind)


def assert_scored(path: Path, found: list[TokenLogprob | None] | None, prompt: list[int], top: int) -> None:
    """Assert that the prompt's log-probabilities equal those of transformers."""
    assert found is not None
    assert found[0] is None
    logprobs = reference_logits(path, prompt)[:-1].log_softmax(-1)
    own = [one for one in found if one is not None]
    assert [one.token_id for one in own] == prompt[1:]
    wanted = logprobs[range(len(prompt) - 1), prompt[1:]]
    np.testing.assert_allclose([one.logprob for one in own], wanted, atol=1e-3)
    assert [one.rank for one in own] == (logprobs >= wanted.unsqueeze(-1)).sum(-1).tolist()
    value, token = logprobs.topk(top)
    assert [[likely for likely, _ in one.top] for one in own] == token.tolist()
    found_tops = np.array([[one for _, one in each.top] for each in own]).reshape(len(own), top)
    np.testing.assert_allclose(found_tops, value, atol=1e-3)


def states_of(path: Path, prompt: list[int]) -> np.ndarray:
    """Return transformers' hidden states `[T, N]` after the final norm."""
    with torch.inference_mode():
        states: torch.Tensor = reference_model(path).base_model(torch.tensor([prompt])).last_hidden_state[0]
    return states.numpy()


def embedding_of(path: Path, prompt: list[int], pooling: Pooling) -> np.ndarray:
    states = states_of(path, prompt)
    pooled = states[-1] if pooling == "last" else states.mean(axis=0)
    found: np.ndarray = pooled / np.linalg.norm(pooled)
    return found


def assert_embedded(path: Path, found: list[EmbeddingOutput], prompts: list[list[int]], pooling: Pooling) -> None:
    assert [one.prompt_token_ids for one in found] == prompts
    for one, prompt in zip(found, prompts, strict=True):
        assert one.embedding.dtype == np.float32
        np.testing.assert_allclose(one.embedding, embedding_of(path, prompt, pooling), atol=1e-4)


@pytest.mark.parametrize("options", [{}, SMALL_STEPS], ids=["whole", "chunks"])
def test_prompt_logprobs_and_embeddings_equal_transformers(path: Path, options: dict[str, Any]) -> None:
    with cpu_engine(path, **options) as one:
        for output, prompt in zip(one.generate(PROMPTS, SCORED), PROMPTS, strict=True):
            assert_scored(path, output.prompt_logprobs, prompt, 3)
            assert [(sample.token_ids, sample.text) for sample in output.outputs] == [([], "")]
            assert output.outputs[0].finish_reason == "length"
        for pooling in POOLINGS:
            assert_embedded(path, one.embed(PROMPTS, pooling=pooling), PROMPTS, pooling)
        assert one.stats()["output_tokens"] == 0


def test_mean_pooling_runs_in_portions_of_few_rows(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = model(directory, "llama")
    pooled = Mock(wraps=torch.segment_reduce)
    monkeypatch.setattr(prompt_outputs, "MAX_POOLED_ROWS", 7)
    monkeypatch.setattr(torch, "segment_reduce", pooled)
    with cpu_engine(path) as one:
        assert_embedded(path, one.embed(PROMPTS, pooling="mean"), PROMPTS, "mean")
    assert max(len(call.args[0]) for call in pooled.call_args_list) == 7


def test_scored_prompt_is_computed_whole_and_then_cached(directory: Path, engine: Engine) -> None:
    path, prompt = model(directory, "llama"), PROMPTS[-1]
    for _ in range(2):
        (output,) = engine.generate([prompt], SCORED)
        assert output.cached_tokens == 0
        assert_scored(path, output.prompt_logprobs, prompt, 3)
    (output,) = engine.generate([prompt], SamplingParams(max_tokens=1))
    assert (output.cached_tokens, output.prompt_logprobs) == (192, None)
    for pooling, cached in (("last", 192), ("mean", 0)):
        (found,) = engine.embed([prompt], pooling=pooling)  # type: ignore[arg-type]
        assert found.cached_tokens == cached
    assert_embedded(path, [found], [prompt], "mean")


@pytest.mark.parametrize("options", [{}, {**SMALL_STEPS, "max_running": 3}], ids=["whole", "chunks"])
def test_prompt_logprobs_and_generation_share_steps_and_stay_exact(directory: Path, options: dict[str, Any]) -> None:
    path = model(directory, "llama")
    both = SamplingParams(n=5, max_tokens=8, temperature=0, ignore_eos=True, prompt_logprobs=1, logprobs=0)
    plain = SamplingParams(n=2, max_tokens=8, temperature=0, ignore_eos=True)
    wanted = [tokens for tokens, _ in reference_greedy(path, PROMPTS, 8)]
    with cpu_engine(path, **options) as one:
        params = [both, plain] * 3
        results: dict[int, RequestOutput] = dict(one.stream(PROMPTS, params))
        for index, asked in enumerate(params):
            assert [sample.token_ids for sample in results[index].outputs] == [wanted[index]] * asked.n
            if asked is both:
                assert_scored(path, results[index].prompt_logprobs, PROMPTS[index], 1)
        stats = one.stats()
        assert stats["output_tokens"] == 8 * 3 * (5 + 2)


async def test_prompt_logprobs_come_with_the_first_delta_beside_embeddings(directory: Path) -> None:
    path, prompt = model(directory, "llama"), PROMPTS[4]
    engine = AsyncEngine(
        EngineConfig(model=str(path), device="cpu", kv_cache_tokens=4096, **SMALL_STEPS), in_process=True
    )
    await engine.start()
    try:
        params = SamplingParams(n=2, max_tokens=4, ignore_eos=True, prompt_logprobs=2)
        streams = [engine.generate(prompt, params, stream=stream) for stream in (True, False)]
        embedded = await engine.embed([prompt, PROMPTS[2]], pooling="mean")
        assert_embedded(path, embedded, [prompt, PROMPTS[2]], "mean")
        for stream in streams:
            seen: set[int] = set()
            async for delta in stream:
                assert (delta.prompt_logprobs is not None) == (delta.index not in seen)
                if delta.index not in seen:
                    assert_scored(path, delta.prompt_logprobs, prompt, 2)
                seen.add(delta.index)
            assert stream.prompt_logprobs == (await stream.output()).prompt_logprobs
        deltas = [delta async for delta in engine.generate(prompt, SCORED)]
        assert [(delta.token_ids, delta.finish_reason) for delta in deltas] == [([], "length")]
        assert_scored(path, deltas[0].prompt_logprobs, prompt, 3)
        assert_all_given_back(manager_of(engine))
    finally:
        await engine.close()


async def test_cancelled_embeddings_free_their_slots_and_pages(directory: Path) -> None:
    path = model(directory, "llama")
    engine = AsyncEngine(
        EngineConfig(model=str(path), device="cpu", kv_cache_tokens=4096, **SMALL_STEPS), in_process=True
    )
    await engine.start()
    try:
        with gated(engine, steps=3) as gate:
            task = asyncio.create_task(engine.embed([PROMPTS[-1]] * 50, pooling="mean"))
            await until(gate.reached.is_set)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await asyncio.to_thread(assert_all_given_back, manager_of(engine))
        assert_embedded(path, await engine.embed(PROMPTS), PROMPTS, "last")
    finally:
        await engine.close()


def test_prompt_without_output_may_fill_max_model_len(directory: Path) -> None:
    path, (prompt,) = model(directory, "llama"), random_prompts((48,))
    with cpu_engine(path, max_model_len=48) as one:
        (output,) = one.generate([prompt], SCORED)
        assert_scored(path, output.prompt_logprobs, prompt, 3)
        assert_embedded(path, one.embed([prompt]), [prompt], "last")
        with pytest.raises(InvalidField, match="at most 47, so that one can follow"):
            one.generate([prompt], SamplingParams(max_tokens=1))
        for refused in (lambda: one.embed([[*prompt, 1]]), lambda: one.generate([[*prompt, 1]], SCORED)):
            with pytest.raises(
                InvalidField,
                match=r"has 49 tokens; allowed: at most 48\.",
            ):
                refused()


def test_embedding_dimensions_and_normalize_are_applied(directory: Path, engine: Engine) -> None:
    prompt = PROMPTS[3]
    whole = states_of(model(directory, "llama"), prompt)[-1]
    (raw,) = engine.embed([prompt], normalize=False)
    np.testing.assert_allclose(raw.embedding, whole, atol=1e-3)
    (short,) = engine.embed([prompt], dimensions=16)
    np.testing.assert_allclose(short.embedding, whole[:16] / np.linalg.norm(whole[:16]), atol=1e-4)
    assert engine.info.hidden_size == len(whole) == 64


@pytest.mark.parametrize(
    ("field", "prompts", "options"),
    [
        ("dimensions", [[1]], {"dimensions": 65}),
        ("dimensions", [[1]], {"dimensions": 0}),
        ("dimensions", [[1]], {"dimensions": True}),
        ("pooling", [[1]], {"pooling": "cls"}),
        ("prompts[1]", [[1], []], {}),
        ("prompts[1]", [[1], [512]], {}),
        ("prompts", "text", {}),
    ],
)
def test_invalid_embed_arguments_are_refused_by_field(
    engine: Engine, field: str, prompts: Any, options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidField) as caught:
        engine.embed(prompts, **options)
    assert caught.value.field == field


@pytest.mark.parametrize("value", [-1, 101, 1.0, True])
def test_invalid_prompt_logprobs_are_refused(value: Any) -> None:
    with pytest.raises(InvalidField, match="prompt_logprobs"):
        SamplingParams(prompt_logprobs=value)

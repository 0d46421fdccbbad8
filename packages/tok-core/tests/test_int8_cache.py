"""An int8 KV cache with a scale for each token and head: tokens are those of a model whose cache is rounded alike."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import Tensor
from transformers import DynamicCache

from support.engines import cpu_engine, random_prompts
from support.parallel_models import model_of
from support.quantized_models import write_kv_scales
from support.sequences import Sequences
from support.tiny_models import make_model, reference_model
from tok_core import Engine, EngineConfig, InvalidField, RequestOutput, SamplingParams
from tok_core.model_config import read_config
from tok_core.quantization import QuantizationConfig
from tok_core.worker.sleep import MemoryRegion
from tok_core.worker.startup.resolve import choose_cache_dtype
from tok_core.worker.state import WorkerState, kv_bytes_per_token

pytestmark = pytest.mark.usefixtures("forked_children")

INT8, CPU = torch.int8, torch.device("cpu")
LAYERS, TOKENS = 3, 60
PROMPTS = random_prompts((TOKENS, 17, 48, 90))
SCORED = SamplingParams(max_tokens=0, prompt_logprobs=0)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


class RoundedCache(DynamicCache):  # type: ignore[misc]
    """transformers' cache, whose keys and values are rounded to 255 steps of the largest number of a token's head."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        steps = (x.abs().amax(-1, keepdim=True) / 127 for x in (key_states, value_states))
        rounded = ((x / step).round() * step for x, step in zip((key_states, value_states), steps, strict=True))
        return super().update(*rounded, layer_idx, *args, **kwargs)


def rounded_logits(path: Path, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        out = reference_model(path)(torch.tensor([tokens]), past_key_values=RoundedCache(), use_cache=True)
        logits: Tensor = out.logits[0]
    return logits


@pytest.mark.parametrize("kind", ["llama3", "qwen3", "mistral", "mixtral"])
def test_logits_equal_transformers_with_equally_rounded_keys_and_values(kind: str, tmp_path: Path) -> None:
    path = make_model(kind, tmp_path / kind, layers=LAYERS)
    model, tokens = model_of(path), PROMPTS[0]
    sequences = Sequences(model, 2, 4, int8=True)
    found = torch.cat(
        [
            sequences.feed([(0, tokens[:37])]),
            *(sequences.feed([(0, [token]), (1, PROMPTS[1][:9])], [0]) for token in tokens[37:40]),
            sequences.feed([(0, tokens[40:])]),
        ]
    )
    expected, exact = rounded_logits(path, tokens), Sequences(model, 1, 4).feed([(0, tokens)])
    # Float32 sums in another order may round a few keys or values to the next integer.
    assert float((found - expected).norm() / expected.norm()) < 0.001
    assert float((exact - expected).norm() / expected.norm()) > 0.003


def test_greedy_tokens_equal_attention_over_the_dequantised_integers(tmp_path: Path) -> None:
    path = make_model("llama3", tmp_path / "llama3", layers=LAYERS)
    with cpu_engine(path, kv_cache_dtype="int8", prefix_groups=True) as engine:
        outputs = engine.generate(PROMPTS, structs.replace(GREEDY, n=2))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        one, other = (sample.token_ids for sample in output.outputs)
        assert one == other
        logits = rounded_logits(path, prompt + one)[len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == one


def logprobs(outputs: list[RequestOutput]) -> list[float]:
    return [one.logprob for output in outputs for one in output.prompt_logprobs or [] if one is not None]


def test_ranks_and_stages_scale_their_own_heads_and_layers(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path / "llama", layers=LAYERS)
    with cpu_engine(path, kv_cache_dtype="int8") as engine:
        expected = logprobs(engine.generate(PROMPTS, SCORED))
    config = EngineConfig(
        model=str(path), kv_cache_dtype="int8", kv_cache_tokens=4096, max_running=8, device="cpu", tp=2, pp=2
    )
    with Engine(config) as engine:
        found = logprobs(engine.generate(PROMPTS, SCORED))
    assert np.abs(np.subtract(found, expected)).mean() < 1e-3


def test_batch_invariant_answers_have_the_same_bits_in_every_schedule(tmp_path: Path) -> None:
    path, found = make_model("qwen3", tmp_path / "qwen3", layers=LAYERS), []
    scored = structs.replace(GREEDY, prompt_logprobs=0, logprobs=0)
    for options in ({}, {"max_step_tokens": 7, "max_running": 7}, {"prefix_groups": False, "page_size": 4}):
        with cpu_engine(path, kv_cache_dtype="int8", batch_invariant=True, **options) as engine:
            outputs = engine.generate([*PROMPTS, PROMPTS[2]], scored)
        samples = [one for output in outputs for one in output.outputs]
        found.append((logprobs(outputs), [token.logprob for one in samples for token in one.logprobs or []]))
        assert samples[2].token_ids == samples[4].token_ids
    assert found[0] == found[1] == found[2]


def test_the_start_reports_the_error_of_an_int8_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scales = torch.full((LAYERS, 2, 2), 50.0)  # of an fp8 cache, for which they would be far too large
    path = write_kv_scales(make_model("llama", tmp_path / "llama", layers=LAYERS), scales)
    with cpu_engine(path, kv_cache_dtype="unquantized") as engine:
        exact = logprobs(engine.generate(PROMPTS, SCORED))
    with caplog.at_level(logging.INFO, "tok_core"), cpu_engine(path, kv_cache_dtype="int8") as engine:
        found = logprobs(engine.generate(PROMPTS, SCORED))
    (report,) = [one for one in caplog.records if "KV cache" in one.message]
    assert report.levelno == logging.INFO
    assert report.getMessage().startswith("the KV cache holds int8 with a scale for each token and head: log-prob")
    assert 0 < np.abs(np.subtract(found, exact)).mean() < 0.5  # a tiny model is very sure of its tokens


def test_an_engine_that_slept_gives_the_same_tokens(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path / "llama", layers=LAYERS)
    with cpu_engine(path, kv_cache_dtype="int8", enable_sleep_mode=True) as engine:
        before = engine.generate(PROMPTS, GREEDY)
        engine.sleep()
        engine.wake_up()
        after = engine.generate(PROMPTS, GREEDY)
    assert [one.outputs[0].token_ids for one in before] == [one.outputs[0].token_ids for one in after]


def test_scales_are_counted_and_lie_in_memory_that_sleeps(tmp_path: Path) -> None:
    config, memory = read_config(make_model("llama", tmp_path / "llama", layers=LAYERS)), MemoryRegion(CPU)
    state = WorkerState(config, CPU, INT8, slots=2, num_pages=49, page_size=16, pages_per_slot=5, memory=memory)
    scales = state.token_scales
    assert scales is not None
    held = state.kv.nbytes + scales.nbytes
    assert held + state.columns.token_of.nbytes == kv_bytes_per_token(config, INT8) * 50 * 16
    state.kv.fill_(1)
    scales.fill_(1.0)
    memory.release(keep=False)
    memory.restore()
    assert not state.kv.any()
    assert not scales.any()
    for cache in state.caches:
        assert cache.k_token_scale is not None
        assert cache.k_token_scale.data_ptr() - scales.data_ptr() < scales.nbytes


def test_a_forked_page_takes_its_scales_along(tmp_path: Path) -> None:
    config = read_config(make_model("llama", tmp_path / "llama", layers=LAYERS))
    state = WorkerState(config, CPU, INT8, slots=2, num_pages=7, page_size=4, pages_per_slot=3)
    assert state.token_scales is not None
    state.token_scales.copy_(torch.rand(state.token_scales.shape))
    before = state.token_scales.clone()
    state._copy_pages(torch.tensor([1, 1, 5]), torch.tensor([4, 5, 2]))
    assert torch.equal(state.token_scales[:, :, [4, 5, 2]], before[:, :, [1, 1, 5]])
    assert torch.equal(state.token_scales[:, :, [0, 1, 3, 6, 7]], before[:, :, [0, 1, 3, 6, 7]])


def test_int8_cache_ignores_stored_scales_and_is_never_the_default() -> None:
    for quantization in (QuantizationConfig(), QuantizationConfig(kv_scales="head")):
        assert choose_cache_dtype("int8", torch.float32, quantization) == INT8
        assert choose_cache_dtype("auto", torch.float32, quantization) != INT8
    with pytest.raises(InvalidField, match=r"kv_cache_dtype is 'int4'; allowed: auto, fp8, .*, int8, unquantized"):
        EngineConfig(model="m", kv_cache_dtype="int4")  # type: ignore[arg-type]

"""Models of every weight format give the greedy tokens of their dequantised weights in transformers, on every path."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

from support.engines import cpu_engine, manager_of, random_prompts
from support.grouping import group_eagerly
from support.parallel_models import greedy_of_shards, logits_of, model_of, tokens_of
from support.quantized_models import BLOCK, ROUNDED, SCHEMES, write_quantized, write_rounded
from support.ranks import run_ranks
from support.short_lengths import PROMPT, SHORT, unsampled
from support.tiny_models import make_model, reference_greedy
from tok_core import Engine, EngineConfig, SamplingParams
from tok_core.config import Quantization, all_coordinates
from tok_core.quantization import read_quantization

pytestmark = pytest.mark.usefixtures("forked_children")

FORMATS = (*SCHEMES, *ROUNDED)
NEW = 24
FIRST, *REST = random_prompts((22, 9, 30, 17))
PROMPTS = [FIRST, FIRST + REST[0], FIRST + REST[1], REST[2]]


def write(name: str, directory: Path) -> tuple[Path, Path, Quantization]:
    """Write a model in a format, or dense for a word of `--quantization`, and its dequantised equal; add the word."""
    if name in ROUNDED:
        return *write_rounded("qwen3", directory, name), ROUNDED[name]
    return *write_quantized("qwen2" if "int" in name else "llama-untied", directory, name), "auto"


@pytest.mark.parametrize("name", FORMATS)
def test_shared_forked_chunked_and_preempted_samples_equal_transformers(name: str, tmp_path: Path) -> None:
    path, dequantised, word = write(name, tmp_path)
    expected = [tokens for tokens, _ in reference_greedy(dequantised, PROMPTS, NEW)]
    stops = (unsampled(expected),)  # the scheduler cannot know the lengths
    params = SamplingParams(n=3, temperature=0, max_tokens=NEW, ignore_eos=True, stop_token_ids=stops)
    sizes = {"kv_cache_tokens": 128, "max_model_len": 128, "page_size": 4, "max_step_tokens": 11, "max_running": 9}
    with cpu_engine(path, quantization=word, **sizes) as engine:
        assert engine.info.linear_layers == str(read_quantization(path, word))
        group_eagerly(manager_of(engine))
        engine.generate([PROMPT], SHORT)
        outputs = engine.generate(PROMPTS, params)
        assert [[sample.token_ids for sample in one.outputs] for one in outputs] == [[one] * 3 for one in expected]
        stats = engine.stats()
        assert stats["preemptions"] > 0
        assert stats["group_rows"] > 0
        assert sum(output.cached_tokens for output in outputs) > 0


def test_ranks_and_stages_of_every_format_equal_transformers(tmp_path: Path) -> None:
    models = [write(name, tmp_path) for name in FORMATS]
    prompt = tokens_of(37)
    expected = [reference_greedy(dequantised, [prompt], 8)[0][0] for _, dequantised, _ in models]
    loaded = [(path, read_quantization(path, word)) for path, _, word in models]
    for of_rank in run_ranks(all_coordinates(1, 2), greedy_of_shards, loaded, prompt, 8):
        for name, found, tokens in zip(FORMATS, of_rank, expected, strict=True):
            assert found == (tokens, tokens), name


def test_engine_of_two_stages_of_two_ranks_rounds_while_loading(tmp_path: Path) -> None:
    path, dequantised, word = write("--quantization fp8", tmp_path)
    expected = [tokens for tokens, _ in reference_greedy(dequantised, PROMPTS, NEW)]
    config = EngineConfig(model=str(path), device="cpu", kv_cache_tokens=4096, tp=2, pp=2, quantization=word)
    with Engine(config) as engine:
        outputs = engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True))
    assert [one.outputs[0].token_ids for one in outputs] == expected


def test_blocks_quantised_by_transformers_equal_its_dequantised_weights(tmp_path: Path) -> None:
    path, dequantised = (make_model("qwen3", tmp_path / name) for name in ("fp8", "dequantised"))
    quantizer = SimpleNamespace(quantization_config=FineGrainedFP8Config(weight_block_size=BLOCK))
    stored = load_file(path / "model.safetensors")
    dense = dict(stored)
    for name in [name for name in stored if name.endswith("_proj.weight")]:
        tensors = Fp8Quantize(quantizer).convert({name: stored[name]})
        stored |= tensors
        (dense[name],) = Fp8Dequantize(quantizer).convert({key: [one] for key, one in tensors.items()})[name]
    save_file(stored, path / "model.safetensors")
    save_file(dense, dequantised / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = quantizer.quantization_config.to_dict()
    (path / "config.json").write_text(json.dumps(config))
    model = model_of(path, quantization=read_quantization(path, "fp8"))
    assert all(map(np.array_equal, logits_of(model), logits_of(model_of(dequantised))))

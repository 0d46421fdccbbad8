"""The models' logits equal those of transformers for every split of tokens into chunks, pages and batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from support.sequences import Sequences
from support.tiny_models import KINDS, make_model, reference_greedy, reference_logits
from tok_core.errors import ModelError
from tok_core.model_config import read_config
from tok_core.models import CausalLM, build, load_checkpoint
from tok_kernels import choose

CPU = torch.device("cpu")


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Check float32 logits to a ten-thousandth of their spread: CPUs round matmuls differently."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.std()))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@cache
def model_path(directory: Path, kind: str) -> Path:
    return make_model(kind, directory / kind)


@cache
def loaded(directory: Path, kind: str, dtype: torch.dtype = torch.float32) -> CausalLM:
    path = model_path(directory, kind)
    model = build(read_config(path), choose(CPU), CPU, dtype)
    load_checkpoint(model, path)
    return model


def some_tokens(count: int, seed: int = 1) -> list[int]:
    tokens: list[int] = torch.randint(0, 512, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return tokens


def in_chunks(tokens: Sequence[int], size: int) -> list[Sequence[int]]:
    return [tokens[start : start + size] for start in range(0, len(tokens), size)]


@pytest.mark.parametrize(("chunk", "page_size"), [(200, 16), (64, 4), (7, 16), (1, 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers_in_chunks_over_shuffled_pages(
    kind: str, chunk: int, page_size: int, directory: Path
) -> None:
    tokens = some_tokens(200)
    sequences = Sequences(loaded(directory, kind), 1, page_size)
    logits = torch.cat([sequences.feed([(0, part)]) for part in in_chunks(tokens, chunk)])
    assert_close(logits, reference_logits(model_path(directory, kind), tokens))


@pytest.mark.parametrize("kind", KINDS)
def test_mixed_decode_and_prefill_step_gives_the_logits_of_each_alone(kind: str, directory: Path) -> None:
    path = model_path(directory, kind)
    a, b, c = some_tokens(40, 1), some_tokens(60, 2), some_tokens(33, 3)
    sequences = Sequences(loaded(directory, kind), 3, 4)
    sequences.feed([(0, a[:-1]), (1, b[:20])])
    mixed = sequences.feed([(0, a[-1:]), (1, b[20:]), (2, c)])
    alone = [reference_logits(path, a)[-1:], reference_logits(path, b)[20:], reference_logits(path, c)]
    assert_close(mixed, torch.cat(alone))


def test_only_requested_rows_reach_the_lm_head(directory: Path) -> None:
    for kind in ("llama", "llama-untied"):
        tokens = some_tokens(30)
        whole = Sequences(loaded(directory, kind), 1, 16).feed([(0, tokens)])
        picked = Sequences(loaded(directory, kind), 1, 16).feed([(0, tokens)], rows=[29, 4])
        torch.testing.assert_close(picked, whole[[29, 4]])


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_logits_stay_near_those_of_float32(kind: str, directory: Path) -> None:
    tokens = some_tokens(50)
    logits = Sequences(loaded(directory, kind, torch.bfloat16), 1, 16).feed([(0, tokens)])
    expected = reference_logits(model_path(directory, kind), tokens)
    assert logits.dtype is torch.bfloat16
    error = (logits.float() - expected).norm() / expected.norm()
    assert error < 0.05


def test_llama3_rope_scaling_changes_logits_of_the_tiny_model(directory: Path) -> None:
    path, tokens = model_path(directory, "llama3"), some_tokens(200)
    model = build(replace(read_config(path), rope_scaling=None), choose(CPU), CPU, torch.float32)
    load_checkpoint(model, path)
    unscaled = Sequences(model, 1, 16).feed([(0, tokens)])
    expected = reference_logits(path, tokens)
    assert (unscaled - expected).abs().max() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_tiny_models_generate_varied_tokens(kind: str, directory: Path) -> None:
    prompts = [some_tokens(count, seed=count) for count in (1, 17, 100)]
    for tokens, logprobs in reference_greedy(model_path(directory, kind), prompts, 64):
        assert len(set(tokens)) >= 10
        assert all(logprob <= 0 for logprob in logprobs)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_biases_on_every_projection_are_computed(kind: str, tmp_path: Path) -> None:
    path = make_model(kind, tmp_path, biases=True)
    config = read_config(path)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, True, kind == "llama")
    model = build(config, choose(CPU), CPU, torch.float32)
    load_checkpoint(model, path)
    logits = Sequences(model, 1, 16).feed([(0, some_tokens(40))])
    assert_close(logits, reference_logits(path, some_tokens(40)))


def test_build_names_an_unsupported_architecture(directory: Path) -> None:
    config = replace(read_config(model_path(directory, "llama")), architecture="MambaForCausalLM")
    with pytest.raises(ModelError, match=r"MambaForCausalLM.*LlamaForCausalLM"):
        build(config, choose(CPU), CPU, torch.float32)

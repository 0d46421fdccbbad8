"""TP ranks and pipeline stages compute the logits of one process, in every TP layout."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from support.expert_models import MOE_KINDS
from support.parallel_models import (
    CPU,
    PROMPT,
    Draws,
    Logits,
    chained_logits,
    compute,
    draws_of,
    greedy,
    logits_of,
    model_of,
    tokens_of,
)
from support.ranks import run_ranks
from support.tiny_models import make_model
from tok_core.config import all_coordinates
from tok_core.model_config import read_config
from tok_core.models import build
from tok_kernels import choose

MODELS = {
    "llama": {},
    "llama-untied": {"biases": True, "vocab_size": 515},
    "qwen2": {"tied": False},
    "qwen2-window": {},
    "qwen3": {"tied": True, "biases": True},
    "mixtral": {},
    "qwen2-moe": {},
    "qwen3-moe": {"seed": 1},
}
ROWS_CUT, DECODES_WHOLE, ALL_WHOLE = 0, 10, 1000  # tokens up to which a step uses all-reduce
STEPS = 12


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parallel")


@cache
def model_path(directory: Path, kind: str) -> Path:
    return make_model(kind, directory / kind, layers=3, **MODELS[kind])  # type: ignore[arg-type]


def assert_close(found: Logits, expected: Logits) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert np.abs(a - b).max(initial=0) <= 5e-5 * np.abs(b).max(initial=0)


def assert_equal_draws(found: list[Draws], expected: list[Draws]) -> None:
    for (token, logprob, top, top_logprob), alone in zip(found, expected, strict=True):
        assert np.array_equal(token, alone[0])
        assert np.array_equal(top, alone[2])
        np.testing.assert_allclose(logprob, alone[1], rtol=0, atol=1e-3)
        np.testing.assert_allclose(top_logprob, alone[3], rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("ranks", "kinds", "max_all_reduce_tokens", "ep"),
    [
        (2, ("llama-untied", "qwen2", "qwen3"), (ROWS_CUT, DECODES_WHOLE, ALL_WHOLE), False),
        (2, MOE_KINDS, (ROWS_CUT, DECODES_WHOLE, ALL_WHOLE), False),
        (2, MOE_KINDS, (ROWS_CUT, DECODES_WHOLE, ALL_WHOLE), True),
        (4, ("qwen3",), (ROWS_CUT, ALL_WHOLE), False),  # two ranks for each key/value head
    ],
)
def test_tp_ranks_compute_logits_and_sample_tokens_of_one_process(
    ranks: int, kinds: tuple[str, ...], max_all_reduce_tokens: tuple[int, ...], ep: bool, directory: Path
) -> None:
    paths = [model_path(directory, kind) for kind in kinds]
    results = run_ranks(all_coordinates(1, ranks, ep=ep), compute, paths, max_all_reduce_tokens, STEPS)
    for path, *of_ranks in zip(paths, *results, strict=True):
        alone = model_of(path)
        expected, tokens = logits_of(alone), greedy(alone, tokens_of(PROMPT), STEPS)
        draws = draws_of(alone) if alone.config.vocab_size % ranks else []
        assert len(set(tokens)) > 5
        in_chunks = chained_logits([alone])
        for logits, chained, chosen, drawn in of_ranks:
            for found in chained:
                assert_close(found, in_chunks)
            assert chosen == tokens
            assert_equal_draws(drawn, draws)
            for found, first in zip(logits, of_ranks[0][0], strict=True):
                assert_close(found, expected)
                assert all(map(np.array_equal, found, first))  # nothing later can differ between ranks


@pytest.mark.parametrize("kind", ["llama", "llama-untied", "qwen2-window", "qwen2-moe"])
@pytest.mark.parametrize("stages", [2, 3])
def test_chained_pipeline_stages_compute_the_logits_of_one_process(stages: int, kind: str, directory: Path) -> None:
    path = model_path(directory, kind)
    chain = [model_of(path, coordinates) for coordinates in all_coordinates(stages, 1)]
    assert_close(chained_logits(chain), chained_logits([model_of(path)]))


def test_pipeline_stage_keeps_the_checkpoint_numbers_of_its_layers(directory: Path) -> None:
    names = {}
    for kind in ("llama", "llama-untied"):
        config = read_config(model_path(directory, kind))
        for coordinates in all_coordinates(3, 1):
            model = build(config, choose(CPU), CPU, torch.float32, coordinates)
            names[kind, coordinates.stage] = {name.removeprefix("model.") for name, _ in model.named_parameters()}
            assert model.local == replace(config, num_layers=1, windows=(None,))
    for (_, stage), found in names.items():
        layers = {name.split(".")[1] for name in found if name.startswith("layers")}
        assert layers == {str(stage)}
    assert "embed_tokens.weight" in names["llama", 0] & names["llama", 2]
    assert "embed_tokens.weight" in names["llama-untied", 0] - names["llama-untied", 2]
    assert "lm_head.weight" in names["llama-untied", 2] - names["llama", 2]
    assert "norm.weight" in names["llama", 2] - names["llama", 0]

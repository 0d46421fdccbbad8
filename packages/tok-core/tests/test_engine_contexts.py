"""Greedy tokens equal transformers' past the original context of every rope scaling, and past sliding windows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from support.engines import cpu_engine, random_prompts
from support.tiny_models import make_model, reference_greedy
from tok_core import InvalidField, SamplingParams

ORIGINAL = 64  # positions before scaling
NEW = 40
LENGTHS = (5, 64, 150)
ROPES: dict[str, Mapping[str, object]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "longrope": {
        "rope_type": "longrope",
        "original_max_position_embeddings": ORIGINAL,
        "factor": 4.0,
    },
}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def rope_of(name: str, head_dim: int) -> dict[str, object]:
    """Return the configuration of ROPES[name]; longrope gets factors for `head_dim // 2` columns."""
    columns = range(head_dim // 2)
    factors = {"short_factor": [1.0 + c / 16 for c in columns], "long_factor": [2.0 + c / 4 for c in columns]}
    return {**ROPES[name], "rope_theta": 1000.0, **(factors if name == "longrope" else {})}


def assert_exact(path: Path, lengths: tuple[int, ...], new: int = NEW, **options: object) -> None:
    """Assert that greedy tokens and log-probabilities equal transformers', also from cached prompts and forks."""
    prompts = random_prompts(lengths, seed=3)
    expected = reference_greedy(path, prompts, new)
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, logprobs=0, n=2)
    with cpu_engine(path, **options) as engine:
        for outputs in (engine.generate(prompts, params), engine.generate(prompts, params)):
            for output, (tokens, logprobs) in zip(outputs, expected, strict=True):
                for sample in output.outputs:
                    assert sample.token_ids == tokens
                    assert sample.logprobs is not None
                    np.testing.assert_allclose([one.logprob for one in sample.logprobs], logprobs, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rope", ROPES)
def test_rope_scalings_of_every_model_family_equal_transformers(rope: str, family: str, tmp_path: Path) -> None:
    grows = rope in ("linear", "dynamic", "yarn")
    own = rope_of(rope, 32 if family == "qwen3" else 16)
    path = make_model(family, tmp_path, rope=own, max_positions=ORIGINAL if grows else 4 * ORIGINAL)
    with cpu_engine(path) as engine:
        assert engine.info.max_model_len == 4 * ORIGINAL
    assert_exact(path, LENGTHS)


@pytest.mark.parametrize("kind", ["mistral", "qwen2-window", "qwen3-window"])
def test_sliding_window_attention_equals_transformers(kind: str, tmp_path: Path) -> None:
    path = make_model(kind, tmp_path)
    for chunk in (16, 512):
        assert_exact(path, (1, 20, 33, 38, 150), max_step_tokens=chunk, max_running=16, page_size=4)


def test_sliding_window_as_long_as_max_model_len_is_exact(tmp_path: Path) -> None:
    path = make_model("mistral", tmp_path)
    prompts = random_prompts((5, 30))
    expected = reference_greedy(path, prompts, 7)
    with cpu_engine(path, max_model_len=37) as engine:
        outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=7, ignore_eos=True))
    assert [output.outputs[0].token_ids for output in outputs] == [tokens for tokens, _ in expected]
    with pytest.raises(InvalidField, match="max_model_len is 1025"), cpu_engine(path, max_model_len=1025):
        pass


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_prefix_cache_is_exact_with_length_dependent_rope_factors(rope: str, tmp_path: Path) -> None:
    """Rope factors depend on the length of the prompt: keys rotated for another length must not be reused."""
    positions = ORIGINAL if rope == "dynamic" else 4 * ORIGINAL
    path = make_model("llama", tmp_path, rope=rope_of(rope, 16), max_positions=positions)
    (whole,) = random_prompts((150,), seed=4)
    short = whole[:40]
    ((follows, _),) = reference_greedy(path, [short], 60)
    turns = [short, [*short, *follows], [*short, *follows, 7, 8]]  # as in a conversation that outgrows the context
    prompts = [*turns, *(whole[:length] for length in (ORIGINAL, ORIGINAL + 1, 100, 150))]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected = [tokens for tokens, _ in reference_greedy(path, prompts, 20)]
    with cpu_engine(path, page_size=4, max_step_tokens=32, max_running=8) as engine:
        for _ in range(2):
            one_by_one = [engine.generate([prompt], params)[0] for prompt in prompts]
            assert [output.outputs[0].token_ids for output in one_by_one] == expected
        assert all(output.cached_tokens == (len(output.prompt_token_ids) - 1) // 4 * 4 for output in one_by_one)
        together = engine.generate(prompts[::-1], params)[::-1]
        assert [output.outputs[0].token_ids for output in together] == expected

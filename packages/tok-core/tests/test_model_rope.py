"""Rotary embeddings read from config.json rotate as in transformers, for every layout of the keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from support.fuzzing import fuzzed
from tok_core.errors import ModelError
from tok_core.model_config import read_config
from tok_core.model_config.families import ARCHITECTURES_OF
from tok_core.model_config.rope import KEYS
from tok_kernels import rope_table

HEAD_DIM, POSITIONS = 16, 200
SHAPE: Mapping[str, object] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "intermediate_size": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "sliding_window": None,
}
EXPERTS = {"num_experts_per_tok": 2}
OF_FAMILY: dict[str, dict[str, object]] = {
    "mixtral": {**EXPERTS, "num_local_experts": 4},
    "qwen2_moe": {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8},
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 8},
}
ORIGINAL = "original_max_position_embeddings"
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 32}
LONGROPE = {
    "short_factor": [1.0 + column / 8 for column in range(8)],
    "long_factor": [2 + column for column in range(8)],
    ORIGINAL: 16,
}
SCALINGS: dict[str, dict[str, object]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {"rope_type": "llama3", **LLAMA3},
    "yarn": {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 64},
    "yarn, no original length": {"rope_type": "yarn", "factor": 4.0},
    "yarn, ratio of lengths": {"rope_type": "yarn", "factor": None, ORIGINAL: 16},
    "yarn, attention factor": {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 64, "attention_factor": 0.7},
    "yarn, mscale": {"rope_type": "yarn", "factor": 40, ORIGINAL: 8, "mscale": 0.707, "mscale_all_dim": 1.2},
    "yarn, one mscale": {"rope_type": "yarn", "factor": 40, ORIGINAL: 8, "mscale": 0.707},
    "yarn, betas": {"rope_type": "yarn", "factor": 4, ORIGINAL: 64, "beta_fast": 8, "beta_slow": 2, "truncate": False},
    "yarn, shrinking": {"rope_type": "yarn", "factor": 0.5, ORIGINAL: 512},
    "longrope": {"rope_type": "longrope", **LONGROPE},
    "longrope, factor": {"rope_type": "longrope", **LONGROPE, "factor": 32.0},
    "longrope, attention factor": {"rope_type": "longrope", **LONGROPE, "attention_factor": 1.5, "factor": 2.0},
}


def write(directory: Path, family: str, changes: Mapping[str, object]) -> Path:
    values = {
        **SHAPE,
        **OF_FAMILY.get(family, {}),
        "model_type": family,
        "architectures": [ARCHITECTURES_OF[family][0]],
    }
    (directory / "config.json").write_text(json.dumps(values | dict(changes)))
    return directory


def ours(path: Path) -> torch.Tensor:
    config = read_config(path)
    return rope_table(config.head_dim, POSITIONS, config.rope_base, config.rope_scaling)


def theirs(path: Path, family: str) -> torch.Tensor:
    """Return the rows of transformers' module, computed one position at a time."""
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    modeling = import_module(f"transformers.models.{family}.modeling_{family}")
    module = getattr(modeling, f"{family.title().replace('_', '')}RotaryEmbedding")(config)
    rows = [module(torch.zeros(1), torch.tensor([[position]])) for position in range(POSITIONS)]
    return torch.cat([torch.cat((cos[0, :, : HEAD_DIM // 2], sin[0, :, : HEAD_DIM // 2]), -1) for cos, sin in rows])


def assert_alike(path: Path, family: str) -> None:
    # The base of dynamic scaling is a power in float32, which is an ulp off if many are computed at once.
    torch.testing.assert_close(ours(path), theirs(path, family), rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", ARCHITECTURES_OF)
@pytest.mark.parametrize("name", SCALINGS)
def test_every_rope_scaling_of_every_family_rotates_as_in_transformers(name: str, family: str, tmp_path: Path) -> None:
    scaling = SCALINGS[name]
    assert_alike(write(tmp_path, family, {"rope_parameters": {**scaling, "rope_theta": 5000.0}}), family)
    assert_alike(write(tmp_path, family, {"rope_scaling": scaling, "rope_theta": 5000.0}), family)
    old = {"type" if key == "rope_type" else key: value for key, value in scaling.items()}
    assert_alike(write(tmp_path, family, {"rope_scaling": old, "rope_theta": 5000}), family)


LINEAR, YARN = SCALINGS["linear"], SCALINGS["yarn"]


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": LINEAR, "rope_parameters": YARN},
        {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
        {"rope_scaling": YARN, "rope_parameters": {}},
        {"rope_scaling": {}, "rope_parameters": LINEAR},
        {"rope_scaling": None, "rope_parameters": LINEAR, "rope_theta": 123.0},
        {"rope_scaling": LINEAR, "rope_parameters": None},
        {"rope_scaling": {}, "rope_parameters": {}, "rope_theta": 123.0},
        {"rope_scaling": {"factor": 4.0, "type": "linear", "rope_theta": 200.0}, "rope_theta": 123.0},
        {"rope_scaling": {"factor": 4.0, "type": "yarn", "rope_type": "linear"}},
        {"rope_scaling": {**YARN, "finetuned": True}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 64}, ORIGINAL: 8},
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, ORIGINAL: 8},
        {"rope_scaling": {"rope_type": "longrope", **LONGROPE}, ORIGINAL: 8},
        {"rope_parameters": {"rope_theta": 123.0}},
        {"rope_parameters": {"partial_rotary_factor": 1.0, "rope_theta": 123.0}},
        {"partial_rotary_factor": 1.0},
        {},
    ],
)
def test_every_rope_key_layout_rotates_as_in_transformers(changes: dict[str, object], tmp_path: Path) -> None:
    assert_alike(write(tmp_path, "llama", changes), "llama")


POSITIVE = st.sampled_from([0.5, 1, 2.0, 8, 33.3])
LENGTHS = st.sampled_from([1, 8, 64, 100])
VALUES: dict[str, st.SearchStrategy[object]] = {
    "rope_theta": st.sampled_from([100.0, 10_000, 1e6]),
    "factor": st.none() | POSITIVE,
    ORIGINAL: st.none() | LENGTHS,
    "attention_factor": st.none() | POSITIVE,
    "beta_fast": st.none() | st.sampled_from([16, 32.0]),
    "beta_slow": st.none() | st.sampled_from([0.5, 1]),
    "mscale": st.none() | st.sampled_from([0, 0.7, 1.0]),
    "mscale_all_dim": st.none() | st.sampled_from([0, 1.0, 1.4]),
    "truncate": st.booleans(),
    "low_freq_factor": st.sampled_from([1, 2.0]),
    "high_freq_factor": st.sampled_from([1.5, 4]),
    "short_factor": st.lists(POSITIVE, min_size=8, max_size=8),
    "long_factor": st.lists(POSITIVE, min_size=8, max_size=8),
}
NEEDED = {"linear": ["factor"], "dynamic": ["factor"], "llama3": [*LLAMA3], "yarn": ["factor"], "longrope": [*LONGROPE]}
ODD: dict[str, st.SearchStrategy[object]] = {
    "type": st.sampled_from(["default", "linear", "yarn", "mrope"]),
    "partial_rotary_factor": st.sampled_from([0.5, 1.0]),
    "full_attention": st.just({"rope_type": "linear", "factor": 2.0}),
    "finetuned": st.booleans(),
    "rope_theta": st.none(),
    "beta_fast": POSITIVE,
    "factor": POSITIVE,
}


@st.composite
def rope_settings(draw: st.DrawFn) -> dict[str, object] | None:
    """Draw values of rope_scaling or rope_parameters: mostly of one rope_type, now and then odd."""
    if draw(st.booleans()):
        few: list[dict[str, object] | None] = [None, {}, {"rope_theta": 300.0}]
        return draw(st.sampled_from(few))
    kind = draw(st.sampled_from(sorted(KEYS)))
    optional = sorted((KEYS[kind] | {"rope_theta"}) - set(NEEDED.get(kind, ())))
    keys = [*NEEDED.get(kind, ()), *draw(st.lists(st.sampled_from(optional), unique=True))]
    values: dict[str, object] = {draw(st.sampled_from(["rope_type", "type"])): kind}
    values |= {key: draw(VALUES[key]) for key in keys}
    odd = draw(st.lists(st.sampled_from(sorted(ODD)), max_size=1)) if draw(st.booleans()) else []
    return values | {key: draw(ODD[key]) for key in odd}


@pytest.mark.filterwarnings("ignore")
@fuzzed(100)
@given(
    scaling=rope_settings(),
    parameters=rope_settings(),
    outer=st.fixed_dictionaries({}, optional={"rope_theta": POSITIVE.map(lambda x: 1000 * x), ORIGINAL: LENGTHS}),
    family=st.sampled_from(sorted(ARCHITECTURES_OF)),
)
def test_fuzzed_rope_settings_are_rejected_or_rotate_as_in_transformers(
    scaling: object, parameters: object, outer: dict[str, object], family: str, tmp_path: Path
) -> None:
    path = write(tmp_path, family, {"rope_scaling": scaling, "rope_parameters": parameters, **outer})
    try:
        found = ours(path)
    except ModelError:
        return
    torch.testing.assert_close(found, theirs(path, family), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("scaling", "context"),
    [("default", 64), ("linear", 256), ("dynamic", 256), ("llama3", 64), ("yarn", 256), ("longrope", 64)],
)
def test_rope_scaling_extends_the_context_as_in_vllm(scaling: str, context: int, tmp_path: Path) -> None:
    assert read_config(write(tmp_path, "llama", {"rope_scaling": SCALINGS[scaling]})).max_positions == context


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"rope_type": "su"}}, "rope_scaling: rope_type is 'su'; allowed: default, linear, dynamic"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters: factor is missing"),
        ({"rope_scaling": {"rope_type": "yarn", ORIGINAL: 8}}, "factor is missing"),
        (
            {"rope_scaling": {**LINEAR, "mrope_section": [1]}},
            r"mrope_section is \[1\]; allowed: nothing, with rope_type",
        ),
        (
            {"rope_scaling": {**LINEAR, "beta_fast": 3}},
            "beta_fast is 3; allowed: nothing, with rope_type linear",
        ),
        (
            {"rope_scaling": {**SCALINGS["dynamic"], ORIGINAL: 8}},
            rf"{ORIGINAL} is 8; allowed: max_position_.*\(64\)",
        ),
        ({"rope_scaling": {**SCALINGS["longrope"], "long_factor": [1.0]}}, "long_factor is .*; allowed: 8 numbers"),
        (
            {"rope_scaling": {**SCALINGS["longrope"], "short_factor": [0] * 8}},
            "short_factor: 0 is 0; allowed: a pos",
        ),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'; allowed: a JSON object"),
        ({"max_position_embeddings": 1 << 40}, r"max_position_embeddings is \d+; allowed: contexts of 1 to"),
        ({"rope_scaling": {**LINEAR, "factor": 1e-3}}, "max_position_embeddings is 64; allowed: contexts of 1 to"),
        ({"rope_scaling": {**YARN, "factor": 1e300}}, "max_position_embeddings is 64; allowed: contexts of 1 to"),
        ({"rope_theta": None}, "rope_theta is None; allowed: a positive number"),
        ({"rope_parameters": {"rope_theta": None}}, "rope_parameters: rope_theta is None"),
        ({"rope_scaling": LINEAR, "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; allowed: 1.0"),
        ({"rope_scaling": {**LINEAR, "partial_rotary_factor": 0.5}}, "rope_scaling: partial_rotary_factor is 0.5"),
    ],
)
def test_unsupported_rope_setting_is_named_in_the_error(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        read_config(write(tmp_path, "llama", changes))

"""read_config understands what transformers writes, old and new, and names what it cannot serve."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.tiny_models import KINDS, LLAMA3_ROPE, make_model
from tok_core.errors import ModelError
from tok_core.model import ARCHITECTURES, read_config
from tok_core.model.config import SUPPORTED_ARCHITECTURES
from tok_kernels import Llama3Scaling

LLAMA: Mapping[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024,
    "eos_token_id": 2,
}
LLAMA3_SCALING = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64)


def write(directory: Path, changes: Mapping[str, object], base: Mapping[str, object] = LLAMA) -> Path:
    """A directory whose config.json is `base` with `changes`; a change to `...` removes the key."""
    values = {key: value for key, value in {**base, **changes}.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def as_version_4(path: Path) -> None:
    """Rewrites config.json in the form of transformers 4."""
    values = json.loads((path / "config.json").read_text())
    rope = values.pop("rope_parameters")
    values["rope_theta"] = rope.pop("rope_theta")
    values["rope_scaling"] = None if rope == {"rope_type": "default"} else rope
    values["torch_dtype"] = values.pop("dtype")
    (path / "config.json").write_text(json.dumps(values))


@pytest.mark.parametrize("kind", KINDS)
def test_the_form_of_transformers_4_reads_like_that_of_5(kind: str, tmp_path: Path) -> None:
    path = make_model(kind, tmp_path)
    new = read_config(path)
    as_version_4(path)
    assert read_config(path) == new


def test_every_field_of_a_real_directory_is_read(tmp_path: Path) -> None:
    config = read_config(make_model("qwen3", tmp_path, dtype=torch.bfloat16, layers=3))
    assert (config.architecture, config.vocab_size, config.hidden_size) == ("Qwen3ForCausalLM", 512, 64)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (3, 4, 2, 32)
    assert (config.intermediate_size, config.rms_norm_eps, config.max_positions) == (128, 1e-6, 1024)
    assert (config.rope_base, config.rope_scaling) == (10_000.0, None)
    assert (config.tied, config.qkv_bias, config.o_bias, config.mlp_bias) == (False, False, False, False)
    assert config.qk_norm
    assert config.dtype is torch.bfloat16
    assert (config.bos_token_id, config.eos_token_ids) == (320, (321, 322))


def test_llama3_scaling_is_read(tmp_path: Path) -> None:
    config = read_config(make_model("llama3", tmp_path))
    assert (config.rope_base, config.rope_scaling) == (500_000.0, LLAMA3_SCALING)


def test_rope_type_may_be_called_type(tmp_path: Path) -> None:
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_type"} | {"type": "llama3"}
    assert read_config(write(tmp_path, {"rope_scaling": scaling})).rope_scaling == LLAMA3_SCALING


def test_scaling_without_original_length_counts_from_the_longest_context(tmp_path: Path) -> None:
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "original_max_position_embeddings"}
    config = read_config(write(tmp_path, {"rope_parameters": scaling}))
    assert config.rope_scaling == replace(LLAMA3_SCALING, original_max_positions=1024)


def test_what_old_llama_configs_leave_out_has_their_defaults(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, {"num_key_value_heads": ..., "bos_token_id": None}))
    assert (config.num_kv_heads, config.head_dim, config.rope_base) == (4, 16, 10_000.0)
    assert (config.dtype, config.tied, config.bos_token_id) == (torch.float32, False, None)


def test_only_qwen2_always_has_qkv_biases(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, {"architectures": ["Qwen2ForCausalLM"]}))
    assert (config.qkv_bias, config.o_bias) == (True, False)
    config = read_config(write(tmp_path, {"attention_bias": True, "mlp_bias": True}))
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, True, True)
    config = read_config(write(tmp_path, {}))
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (False, False, False)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (2, None, (2,)),
        (2, {"eos_token_id": [5, 6]}, (5, 6)),
        ([2, 3], {"eos_token_id": 7}, (7,)),
        ([2, 3], {"eos_token_id": None}, (2, 3)),
        ([2, 3, 2], {}, (2, 3)),
        (None, None, ()),
        (0, {}, (0,)),
        (3, {"eos_token_id": 0}, (0,)),
    ],
)
def test_generation_config_has_the_last_word_on_eos(
    in_config: object, in_generation: object, expected: tuple[int, ...], tmp_path: Path
) -> None:
    write(tmp_path, {"eos_token_id": in_config})
    if in_generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(in_generation))
    assert read_config(tmp_path).eos_token_ids == expected


def test_sliding_window_that_no_layer_uses_is_no_obstacle(tmp_path: Path) -> None:
    unused: list[dict[str, object]] = [
        {"sliding_window": 128},
        {"sliding_window": 128, "use_sliding_window": False},
        {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 2},
        {"layer_types": ["full_attention"] * 2},
    ]
    for changes in unused:
        assert read_config(write(tmp_path, changes)).num_layers == 2


REQUIRED = (
    "architectures",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "rms_norm_eps",
    "max_position_embeddings",
)


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(key: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: {key} is "):
        read_config(write(tmp_path, {key: ...}))


def test_qwen3_must_name_its_head_size(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="head_dim is missing"):
        read_config(write(tmp_path, {"architectures": ["Qwen3ForCausalLM"]}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            r"GPT2LMHeadModel.*LlamaForCausalLM, Qwen2.*, Qwen3ForCausalLM",
        ),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'.*list of strings"),
        ({"vocab_size": 0}, "vocab_size is 0; allowed: an integer of at least 1"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0; allowed: a positive number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; allowed: true or false"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; allowed: a divisor of 4"),
        ({"num_attention_heads": 7}, "num_attention_heads is 7; allowed: a divisor of hidden_size"),
        ({"head_dim": 15}, "head_dim is 15; allowed: an even number"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; allowed: silu"),
        ({"dtype": "float8_e4m3fn"}, "dtype is 'float8_e4m3fn'; allowed: float32, float16, bfloat16"),
        ({"torch_dtype": "int8"}, "torch_dtype is 'int8'"),
        ({"eos_token_id": 512}, "eos_token_id is 512; allowed: token ids from 0 to 511"),
        ({"eos_token_id": [1, "</s>"]}, "eos_token_id is"),
        ({"bos_token_id": -1}, "bos_token_id is -1"),
        (
            {"quantization_config": {"quant_method": "awq"}},
            "quantization_config: quantised by 'awq'; supported: float32",
        ),
        (
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "sliding-window.*full attention",
        ),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_type is 'yarn'; allowed: default, llama3",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_type is 'linear'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters: rope_type is 'dynamic'"),
        ({"rope_parameters": [1]}, r"rope_parameters is \[1\]; allowed: a JSON object"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "several settings; supported: one",
        ),
        ({"rope_parameters": {**LLAMA3_ROPE, "factor": None}}, "rope_parameters: factor is missing"),
        (
            {"rope_parameters": {**LLAMA3_ROPE, "high_freq_factor": 1.0}},
            "high_freq_factor is 1.0; allowed: more",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; allowed: 1.0"),
    ],
)
def test_what_cannot_be_served_is_named(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        read_config(write(tmp_path, changes))


@pytest.mark.parametrize(("content", "message"), [("{", "cannot be read as JSON"), ("[1]", "holds a list")])
def test_a_file_that_is_no_object_is_named(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=rf"config\.json: {message}"):
        read_config(tmp_path)
    write(tmp_path, {})
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ModelError, match=rf"generation_config\.json: {message}"):
        read_config(tmp_path)


def test_a_directory_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        read_config(tmp_path)


def test_every_architecture_that_reads_can_be_built() -> None:
    assert set(ARCHITECTURES) == set(SUPPORTED_ARCHITECTURES)

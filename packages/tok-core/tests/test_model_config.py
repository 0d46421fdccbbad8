"""read_config reads files of transformers 4 and 5, and names keys and values that are not supported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from support.engines import cpu_engine
from support.tiny_models import KINDS, LLAMA3_ROPE, make_model
from tok_core.errors import ModelError
from tok_core.model_config import read_config
from tok_core.model_config.config_keys import ALLOWED, ALLOWED_BY, HARMLESS, HONOURED, HONOURED_BY
from tok_core.model_config.families import ARCHITECTURES_OF, SUPPORTED_ARCHITECTURES
from tok_core.models import ARCHITECTURES
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
    """Write `base` with `changes` as config.json; a change to `...` removes the key."""
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
def test_config_in_transformers_4_format_reads_like_version_5(kind: str, tmp_path: Path) -> None:
    path = make_model(kind, tmp_path)
    new = read_config(path)
    as_version_4(path)
    assert read_config(path) == new


def test_read_config_reads_every_field_of_a_saved_model(tmp_path: Path) -> None:
    config = read_config(make_model("qwen3", tmp_path, dtype=torch.bfloat16, layers=3))
    assert (config.architecture, config.vocab_size, config.hidden_size) == ("Qwen3ForCausalLM", 512, 64)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (3, 4, 2, 32)
    assert (config.intermediate_size, config.rms_norm_eps, config.max_positions) == (128, 1e-6, 1024)
    assert (config.rope_base, config.rope_scaling) == (10_000.0, None)
    assert (config.tied, config.qkv_bias, config.o_bias, config.mlp_bias) == (False, False, False, False)
    assert config.qk_norm
    assert config.dtype is torch.bfloat16
    assert (config.bos_token_id, config.eos_token_ids) == (320, (321, 322))


def test_llama3_rope_scaling_is_read(tmp_path: Path) -> None:
    config = read_config(make_model("llama3", tmp_path))
    assert (config.rope_base, config.rope_scaling) == (500_000.0, LLAMA3_SCALING)


def test_rope_type_may_be_called_type(tmp_path: Path) -> None:
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_type"} | {"type": "llama3"}
    assert read_config(write(tmp_path, {"rope_scaling": scaling})).rope_scaling == LLAMA3_SCALING


def test_llama3_scaling_original_length_defaults_to_max_positions(tmp_path: Path) -> None:
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "original_max_position_embeddings"}
    config = read_config(write(tmp_path, {"rope_parameters": scaling}))
    assert config.rope_scaling == replace(LLAMA3_SCALING, original_max_positions=1024)


def test_keys_missing_from_old_llama_configs_get_their_defaults(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, {"num_key_value_heads": ..., "bos_token_id": None}))
    assert (config.num_kv_heads, config.head_dim, config.rope_base) == (4, 16, 10_000.0)
    assert (config.dtype, config.tied, config.bos_token_id) == (torch.float32, False, None)


def test_only_qwen2_always_has_qkv_biases(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, {"architectures": ["Qwen2ForCausalLM"], "attention_bias": False}))
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
def test_generation_config_overrides_eos_token_ids(
    in_config: object, in_generation: object, expected: tuple[int, ...], tmp_path: Path
) -> None:
    write(tmp_path, {"eos_token_id": in_config})
    if in_generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(in_generation))
    assert read_config(tmp_path).eos_token_ids == expected


QWEN2: Mapping[str, object] = {**LLAMA, "architectures": ["Qwen2ForCausalLM"]}
MISTRAL: Mapping[str, object] = {**LLAMA, "architectures": ["MistralForCausalLM"]}
TYPES = ["full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("base", "changes", "windows"),
    [
        (LLAMA, {}, (None, None)),
        (LLAMA, {"sliding_window": None, "use_sliding_window": False}, (None, None)),
        (LLAMA, {"sliding_window": 128, "use_sliding_window": False}, (None, None)),
        (LLAMA, {"sliding_window": 1024}, (None, None)),
        (LLAMA, {"layer_types": ["full_attention"] * 2}, (None, None)),
        (QWEN2, {}, (None, None)),
        (QWEN2, {"sliding_window": 128}, (None, None)),
        (QWEN2, {"sliding_window": 128, "use_sliding_window": False, "max_window_layers": 0}, (None, None)),
        (QWEN2, {"sliding_window": 128, "use_sliding_window": True}, (None, None)),
        (QWEN2, {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 2}, (None, None)),
        (QWEN2, {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 1}, (None, 128)),
        (QWEN2, {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 0}, (128, 128)),
        (QWEN2, {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, (None, None)),
        (QWEN2, {"sliding_window": 1024, "use_sliding_window": True, "max_window_layers": 0}, (None, None)),
        (QWEN2, {"sliding_window": 8, "use_sliding_window": True, "layer_types": TYPES}, (None, 8)),
        (QWEN2, {"sliding_window": 8, "layer_types": ["full_attention"] * 2}, (None, None)),
        # transformers' default window, where a layer slides and no key gives the size
        (
            QWEN2,
            {"use_sliding_window": True, "max_window_layers": 0, "max_position_embeddings": 8192},
            (4096, 4096),
        ),
        (MISTRAL, {"max_position_embeddings": 8192}, (4096, 4096)),
        (MISTRAL, {}, (None, None)),
        (MISTRAL, {"sliding_window": None, "max_position_embeddings": 8192}, (None, None)),
        (MISTRAL, {"sliding_window": 128}, (128, 128)),
        (MISTRAL, {"sliding_window": 128, "layer_types": ["sliding_attention"] * 2}, (128, 128)),
        (MISTRAL, {"sliding_window": None, "layer_types": ["full_attention"] * 2}, (None, None)),
        # a context that scaling stretches beyond the window
        (MISTRAL, {"sliding_window": 1024, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, (1024, 1024)),
    ],
)
def test_sliding_window_of_every_layer_is_read(
    base: Mapping[str, object], changes: dict[str, object], windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    assert read_config(write(tmp_path, changes, {**base, "num_key_value_heads": 2})).windows == windows


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (LLAMA, {"sliding_window": 128}, "sliding_window is 128; allowed: null, or use_sliding_window false"),
        (LLAMA, {"use_sliding_window": True}, "use_sliding_window is True; allowed: false"),
        (LLAMA, {"layer_types": TYPES}, "layer_types is .*; allowed: full_attention"),
        (QWEN2, {"sliding_window": 128, "layer_types": TYPES}, "layer_types is .* full_attention .there is no sliding"),
        (QWEN2, {"layer_types": ["full_attention"]}, "layer_types is .*; allowed: one entry for each of 2 layers"),
        (QWEN2, {"layer_types": ["full_attention", "linear_attention"]}, "layer_types is .*; allowed: full_attention"),
        (QWEN2, {"use_sliding_window": True, "sliding_window": 0}, "sliding_window is 0; allowed: an integer of at"),
        (QWEN2, {"use_sliding_window": "no"}, "use_sliding_window is 'no'; allowed: true or false"),
        (MISTRAL, {"sliding_window": 8, "layer_types": TYPES}, "layer_types is .*; allowed: sliding_attention"),
        (MISTRAL, {"sliding_window": 8, "use_sliding_window": False}, "use_sliding_window is False; allowed: true, or"),
        (MISTRAL, {"sliding_window": None, "layer_types": TYPES}, "layer_types is .*; allowed: full_attention"),
    ],
)
def test_contradictory_sliding_window_keys_are_rejected(
    base: Mapping[str, object], changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        read_config(write(tmp_path, changes, base))


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
def test_missing_config_key_is_named_in_the_error(key: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: {key} is "):
        read_config(write(tmp_path, {key: ...}))


def test_qwen3_config_without_head_dim_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="head_dim is missing"):
        read_config(write(tmp_path, {"architectures": ["Qwen3ForCausalLM"]}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            r"GPT2LMHeadModel.*LlamaForCausalLM, MistralForCausalLM, .*Qwen2.*, Qwen3ForCausalLM",
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
        ({"num_hidden_layers": 1 << 63}, "num_hidden_layers is 9223372036854775808; allowed: at most 10000"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; allowed: .silu. or .swish."),
        ({"dtype": "float8_e4m3fn"}, "dtype is 'float8_e4m3fn'; allowed: float32, float16, bfloat16"),
        ({"torch_dtype": "int8"}, "torch_dtype is 'int8'"),
        ({"eos_token_id": 512}, "eos_token_id is 512; allowed: token ids from 0 to 511"),
        ({"eos_token_id": [1, "</s>"]}, "eos_token_id is"),
        ({"bos_token_id": -1}, "bos_token_id is -1"),
        ({"rope_parameters": [1]}, r"rope_parameters is \[1\]; allowed: a JSON object"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "several settings; supported: one",
        ),
        ({"rope_parameters": {**LLAMA3_ROPE, "factor": None}}, "rope_parameters: factor is missing"),
        (
            {"rope_parameters": {**LLAMA3_ROPE, "high_freq_factor": 1.0}},
            "high_freq_factor is 1.0; it must be above low",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; allowed: 1.0"),
        ({"is_causal": False}, "is_causal is False; allowed: true"),
        ({"is_causal": None}, "is_causal is None; allowed: true"),
        ({"is_causal": 1}, "is_causal is 1; allowed: true"),
        ({"attention_multiplier": 0.0078125}, "attention_multiplier is 0.0078125; allowed: null"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier is 12.0; allowed: 1.0"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0; allowed: null"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads is .*; allowed: {}"),
        ({"per_layer_config": {"0": {"intermediate_size": 8}}}, "per_layer_config is .*; allowed: {}"),
        ({"add_cross_attention": True}, "add_cross_attention is True; allowed: false"),
        ({"rope_interleaved": True}, "rope_interleaved is True; allowed: false"),
        ({"no_rope_layers": [0, 1]}, "no_rope_layers"),
        ({"vision_config": {}}, "vision_config is {}; allowed: null"),
        ({"quantization": {"bits": 4}}, "quantization is .*; allowed: null"),
        (
            {"model_type": "gpt2"},
            "model_type is 'gpt2'; allowed: llama, mistral, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe",
        ),
        (
            {"model_type": "mistral"},
            r"architectures is .'LlamaForCausalLM'.; allowed: MistralForCausalLM, MistralModel .model_type is 'mis",
        ),
        ({"architectures": ["LlamaForCausalLM", "MistralForCausalLM"]}, "architectures is"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures is"),
        ({"norm_type": "layernorm"}, "not known here: norm_type; if they change nothing, ignore them by --ignore-con"),
        ({"a": 1, "b": False, "c": None}, "not known here: a, b; .*--ignore-config-keys a,b "),
    ],
)
def test_unsupported_config_value_is_named_in_the_error(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        read_config(write(tmp_path, changes))


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "cannot be read as JSON"), ("[1]", "holds a list"), ("[" * 100_000, "cannot be read")],
)
def test_config_file_that_is_not_a_json_object_is_named(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=rf"config\.json: {message}"):
        read_config(tmp_path)
    write(tmp_path, {})
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ModelError, match=rf"generation_config\.json: {message}"):
        read_config(tmp_path)


def test_directory_without_config_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        read_config(tmp_path)


def test_every_supported_architecture_has_a_model_class() -> None:
    assert set(ARCHITECTURES) == set(SUPPORTED_ARCHITECTURES)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "LlamaModel", "LLaMAForCausalLM", None])
def test_model_type_or_architectures_selects_the_architecture(name: str | None, tmp_path: Path) -> None:
    named = {"architectures": None if name is None else [name]}
    assert read_config(write(tmp_path, {**named, "model_type": "llama"})).architecture == "LlamaForCausalLM"
    if name is not None:
        assert read_config(write(tmp_path, named)).architecture == "LlamaForCausalLM"


def test_read_config_ignores_unknown_keys_only_when_listed(tmp_path: Path) -> None:
    plain = read_config(write(tmp_path, {}))
    path = write(tmp_path, {"norm_type": "layernorm", "odd": 1})
    assert read_config(path, ("norm_type", "odd", "another")) == plain
    with pytest.raises(ModelError, match="not known here: odd;"):
        read_config(path, ("norm_type",))
    for key in ("hidden_size", "is_causal", "use_cache"):
        with pytest.raises(ModelError, match=f"{key} cannot be ignored; allowed: keys that are not known"):
            read_config(path, (key,))


def test_engine_ignores_unknown_config_keys_only_when_listed(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path)
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**values, "norm_type": "rms"}))
    with pytest.raises(ModelError, match="not known here: norm_type"), cpu_engine(path):
        pass
    with cpu_engine(path, ignore_config_keys=("norm_type",)) as engine:
        assert engine.info.max_model_len == 1024


def test_every_transformers_config_key_is_classified_in_a_table() -> None:
    for family in ARCHITECTURES_OF:
        honoured, allowed = HONOURED | HONOURED_BY[family], {**ALLOWED, **ALLOWED_BY.get(family, {})}
        assert not honoured & HARMLESS
        assert not HARMLESS & allowed.keys()
        assert not HONOURED & allowed.keys()
        theirs = AutoConfig.for_model(family).to_dict()
        assert not [key for key in theirs if key not in honoured | HARMLESS | allowed.keys()]
    base = PreTrainedConfig().to_dict().keys() | GenerationConfig._get_default_generation_params().keys()
    assert not [key for key in base if key not in HONOURED | HARMLESS | ALLOWED.keys()]


def test_absent_config_keys_default_as_in_transformers(tmp_path: Path) -> None:
    """Old or hand-written files leave these keys out or set them to null."""
    for family in ("llama", "mistral", "qwen2"):
        base = {**LLAMA, "architectures": None, "model_type": family, "num_attention_heads": 32, "hidden_size": 128}
        for changes in ({},) if family == "mistral" else ({}, {"num_key_value_heads": None}):
            left_out: dict[str, object] = dict.fromkeys(("num_key_value_heads", "eos_token_id", "bos_token_id"), ...)
            path = write(tmp_path, {**left_out, **changes}, base)
            ours, theirs = read_config(path), AutoConfig.from_pretrained(path, local_files_only=True)
            assert ours.num_kv_heads == theirs.num_key_value_heads
            assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
            assert ours.bos_token_id == theirs.bos_token_id

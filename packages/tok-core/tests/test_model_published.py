"""Published configurations (published_configs.json, written from memory) are read as in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from transformers import AutoConfig

from support.fuzzing import VALUES, changed, fuzzed
from tok_core.errors import ModelError
from tok_core.model_config import read_config
from tok_core.model_config.config_keys import ALLOWED, HARMLESS, HONOURED

PUBLISHED = json.loads((Path(__file__).parent / "published_configs.json").read_text())
# Context length with rope scaling, where it differs from max_position_embeddings.
STRETCHED = {
    "deepseek-ai/deepseek-coder-6.7b-base": 65_536,
    "lmsys/longchat-7b-v1.5-32k": 32_768,
    "Qwen/Qwen2.5-7B-Instruct with YaRN": 131_072,
    "Qwen/Qwen3-8B with YaRN": 131_072,
}
FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "intermediate_size": "intermediate_size",
    "rms_norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
    "bos_token_id": "bos_token_id",
}


def write(directory: Path, config: object) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def assert_alike(ours: Any, theirs: Any) -> None:
    """Check that both have read the same model."""
    assert ours.architecture == f"{theirs.model_type.title().replace('_', '')}ForCausalLM"
    for mine, its in FIELDS.items():
        assert getattr(ours, mine) == getattr(theirs, its), mine
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert ours.rope_base == theirs.rope_parameters["rope_theta"]
    assert (ours.rope_scaling is None) == (theirs.rope_parameters["rope_type"] == "default")
    ends = theirs.eos_token_id if isinstance(theirs.eos_token_id, list) else [theirs.eos_token_id]
    assert list(ours.eos_token_ids) == list(dict.fromkeys(end for end in ends if end is not None))
    types = (
        theirs.layer_types
        if theirs.model_type.startswith("qwen") and theirs.model_type != "qwen3_moe"
        else [theirs.model_type] * len(ours.windows)
    )
    windows = [theirs.sliding_window if kind in ("mistral", "mixtral", "sliding_attention") else None for kind in types]
    assert list(ours.windows) == [one if one and one < ours.max_positions else None for one in windows]
    biased = {"qwen2": True, "qwen2_moe": getattr(theirs, "qkv_bias", True), "mistral": False, "mixtral": False}.get(
        theirs.model_type, getattr(theirs, "attention_bias", False)
    )
    assert (ours.qkv_bias, ours.o_bias) == (biased, biased and not theirs.model_type.startswith("qwen2"))
    assert (ours.moe is None) == (not hasattr(theirs, "num_experts_per_tok"))
    if ours.moe is not None:
        assert ours.moe.experts == getattr(theirs, "num_experts", None) or theirs.num_local_experts
        assert ours.moe.experts_per_token == theirs.num_experts_per_tok
        assert ours.moe.intermediate_size == getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
        assert ours.moe.normalize == getattr(theirs, "norm_topk_prob", True)
        assert ours.moe.shared_intermediate_size == getattr(theirs, "shared_expert_intermediate_size", 0)
    assert ours.mlp_bias == (theirs.model_type == "llama" and theirs.mlp_bias)


@pytest.mark.parametrize("name", PUBLISHED["served"])
def test_published_config_is_read_as_in_transformers(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, PUBLISHED["served"][name])
    ours, theirs = read_config(path), AutoConfig.from_pretrained(path, local_files_only=True)
    assert_alike(ours, theirs)
    assert ours.dtype == theirs.dtype
    assert ours.max_positions == STRETCHED.get(name, theirs.max_position_embeddings)


@pytest.mark.parametrize("name", PUBLISHED["refused"])
def test_unsupported_published_config_is_rejected_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=PUBLISHED["refused"][name]["names"]):
        read_config(write(tmp_path, PUBLISHED["refused"][name]["config"]))


SERVED = list(PUBLISHED["served"].values())
KEYS = st.sampled_from(sorted(HONOURED | HARMLESS | ALLOWED.keys()))
NEAR: st.SearchStrategy[object] = st.booleans() | st.sampled_from(
    [None, 0, 1, 2, 64, 4096, 1.0, 0.5, [], {}, "silu", "float16", "llama", "qwen3"]
)


@st.composite
def hostile_configs(draw: st.DrawFn) -> Any:
    """Draw a published configuration with some values replaced, at random or by values that other keys hold."""
    config = draw(changed(SERVED)) if draw(st.booleans()) else json.loads(json.dumps(draw(st.sampled_from(SERVED))))
    if isinstance(config, dict):
        config |= draw(st.dictionaries(KEYS, NEAR | VALUES if draw(st.booleans()) else NEAR, max_size=3))
    return config


@pytest.mark.filterwarnings("ignore")
@fuzzed(400)
@given(config=hostile_configs())
def test_fuzzed_config_is_rejected_or_read_as_in_transformers(config: Any, tmp_path: Path) -> None:
    path = write(tmp_path, config)
    refusal = ""
    try:
        ours = read_config(path)
    except ModelError as error:
        refusal = str(error)
    if refusal:
        event("refused")
        assert str(path) in refusal
        return
    try:
        theirs = AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception:
        event("read here only")
        return
    event("read by both")
    assert_alike(ours, theirs)

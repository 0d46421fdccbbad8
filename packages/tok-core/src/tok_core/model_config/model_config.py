"""Read a model's shape and settings from config.json and generation_config.json, as transformers 5 does."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tok_core.errors import ModelError
from tok_core.model_config.config_keys import check_keys
from tok_core.model_config.eagle3 import Eagle3Config, flattened, is_eagle3, read_eagle3
from tok_core.model_config.experts import MoEConfig, read_experts
from tok_core.model_config.families import ARCHITECTURES_OF, read_family
from tok_core.model_config.fields import Fields
from tok_core.model_config.rope import read_rope
from tok_core.model_config.windows import read_windows
from tok_kernels import RopeScaling

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
MAX_LAYERS = 10_000  # `windows` has an entry for each layer
# Defaults of transformers for keys that config.json does not contain; a key set to null has no default here.
KV_HEADS = {"mistral": 8, "mixtral": 8, "qwen2": 32, "qwen2_moe": 16, "qwen3": 32, "qwen3_moe": 4}
SPECIAL_TOKENS = {"bos_token_id": 1, "eos_token_id": 2}
WITH_SPECIAL_TOKENS = ("llama", "mistral", "mixtral")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and settings of a decoder.

    dtype          the dtype that config.json names
    rope_scaling   None: plain rotary embedding
    max_positions  longest context that the model supports, with its scaling
    windows        for each layer the number of positions that a token attends to, itself included; None: all
    tied           the LM head is the embedding matrix
    moe            mixture of experts of some or all layers; None: no layer has one
    eagle3         what an EAGLE-3 head has beside its layer; None: a model of its own
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_base: float
    rope_scaling: RopeScaling
    max_positions: int
    windows: tuple[int | None, ...]
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    moe: MoEConfig | None = None
    eagle3: Eagle3Config | None = None


def read_config(path: Path, ignored: Collection[str] = ()) -> ModelConfig:
    """Return the configuration of the model in directory `path`; `ignored` names keys of config.json to skip.

    Raises ModelError, which names the file and the key, for a missing or unknown key or an unsupported value.
    """
    config = _config_file(path)
    family = read_family(config)
    check_keys(config, family, ignored)
    return _decoder(path, config, family)


def read_head(path: Path, target: ModelConfig, ignored: Collection[str] = ()) -> ModelConfig | None:
    """Return the configuration of the EAGLE-3 head for `target` in directory `path`; None if it holds no such head.

    Raises ModelError as `read_config`, and for a head of another target model.
    """
    config = _config_file(path)
    if not is_eagle3(config):
        return None
    config = flattened(config)
    check_keys(config, "eagle3", ignored)
    family = config.text("model_type", "llama")
    if family != "llama":
        raise config.wrong("model_type", family, "llama (an EAGLE-3 head)")
    head = read_eagle3(config, target.num_layers, target.hidden_size, target.vocab_size)
    own_size = config.integer("draft_vocab_size", head.target_vocab_size)
    layer = _decoder(path, config, family)
    return replace(layer, architecture="Eagle3LlamaForCausalLM", vocab_size=own_size, eagle3=head)


def _config_file(path: Path) -> Fields:
    if not (path / "config.json").is_file():
        raise ModelError(f"{path}: has no config.json")
    return Fields.of_file(path / "config.json")


def _decoder(path: Path, config: Fields, family: str) -> ModelConfig:
    """Return the configuration in `config`, whose keys are checked, with the defaults of `family`."""
    vocab_size, num_layers = config.integer("vocab_size"), config.integer("num_hidden_layers")
    if num_layers > MAX_LAYERS:
        raise config.wrong("num_hidden_layers", num_layers, f"at most {MAX_LAYERS}")
    num_heads, num_kv_heads, head_dim = _heads(config, family)
    rope = read_rope(config, family, head_dim, config.integer("max_position_embeddings"))
    eos, bos = _special_tokens(path, config, family, vocab_size)
    attention_bias = family in ("llama", "qwen3", "qwen3_moe") and config.flag("attention_bias")
    return ModelConfig(
        architecture=ARCHITECTURES_OF[family][0],
        vocab_size=vocab_size,
        hidden_size=config.integer("hidden_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=config.integer("intermediate_size"),
        rms_norm_eps=config.number("rms_norm_eps"),
        rope_base=rope.base,
        rope_scaling=rope.scaling,
        max_positions=rope.max_positions,
        windows=read_windows(config, family, num_layers, rope.max_positions),
        tied=config.flag("tie_word_embeddings"),
        qkv_bias=family == "qwen2" or attention_bias or (family == "qwen2_moe" and config.flag("qkv_bias", True)),
        o_bias=attention_bias,
        mlp_bias=family == "llama" and config.flag("mlp_bias"),
        qk_norm=family in ("qwen3", "qwen3_moe"),
        dtype=_dtype(config),
        eos_token_ids=eos,
        bos_token_id=bos,
        moe=read_experts(config, family, num_layers),
    )


def _heads(config: Fields, family: str) -> tuple[int, int, int]:
    """Return query heads, key/value heads and head size; only Qwen3 requires a head size in config.json."""
    num_heads = config.integer("num_attention_heads")
    absent = "num_key_value_heads" not in config.nulls and family in KV_HEADS
    num_kv_heads = config.integer("num_key_value_heads", KV_HEADS[family] if absent else num_heads)
    derived, rest = divmod(config.integer("hidden_size"), num_heads)
    if "head_dim" not in config and rest:
        raise config.wrong("num_attention_heads", num_heads, "a divisor of hidden_size, or head_dim given")
    head_dim = config.integer("head_dim", None if family == "qwen3" else derived)
    if num_heads % num_kv_heads:
        raise config.wrong("num_key_value_heads", num_kv_heads, f"a divisor of {num_heads} query heads")
    if head_dim % 2:
        raise config.wrong("head_dim", head_dim, "an even number")
    return num_heads, num_kv_heads, head_dim


def _special_tokens(path: Path, config: Fields, family: str, vocab_size: int) -> tuple[tuple[int, ...], int | None]:
    """Return end ids and begin id; generation_config.json, if present, takes precedence over config.json."""
    generation = path / "generation_config.json"
    sources = [Fields.of_file(generation)] if generation.is_file() else []
    sources.append(config)
    found = {}
    for key, default in SPECIAL_TOKENS.items():
        ids = next((ids for fields in sources if (ids := fields.token_ids(key, vocab_size))), ())
        absent = key not in config and key not in config.nulls and family in WITH_SPECIAL_TOKENS
        found[key] = ids or ((default,) if absent and default < vocab_size else ())
    return found["eos_token_id"], next(iter(found["bos_token_id"]), None)


def _dtype(config: Fields) -> torch.dtype:
    key = "dtype" if "dtype" in config else "torch_dtype"
    name = config.text(key, "float32")
    if name not in DTYPES:
        raise config.wrong(key, name, ", ".join(DTYPES))
    return DTYPES[name]

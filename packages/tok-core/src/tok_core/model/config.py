"""What a model is: its shape and settings, read from config.json and generation_config.json and checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from tok_core.errors import ModelError
from tok_core.model.fields import Fields
from tok_core.model.rope import read_rope
from tok_kernels import Llama3Scaling

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and settings of a decoder.

    `dtype` is the one the checkpoint names; `rope_scaling` None means plain rotary embedding; `max_positions`
    is the longest context the model was made for; `tied` says that the LM head is the embedding matrix.
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
    rope_scaling: Llama3Scaling | None
    max_positions: int
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


def read_config(path: Path) -> ModelConfig:
    """The configuration of the model in directory `path`.

    Raises ModelError that names the file and the key that is missing or holds what is not supported.
    """
    if not (path / "config.json").is_file():
        raise ModelError(f"{path}: has no config.json")
    config = Fields.of_file(path / "config.json")
    architecture = _architecture(config)
    _refuse_unsupported(config)
    vocab_size = config.integer("vocab_size")
    max_positions = config.integer("max_position_embeddings")
    num_heads, num_kv_heads, head_dim = _heads(config, architecture)
    base, scaling = read_rope(config, max_positions)
    eos, bos = _special_tokens(path, config, vocab_size)
    qwen2, llama = architecture == "Qwen2ForCausalLM", architecture == "LlamaForCausalLM"
    attention_bias = not qwen2 and config.flag("attention_bias")
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=config.integer("hidden_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=config.integer("intermediate_size"),
        rms_norm_eps=config.number("rms_norm_eps"),
        rope_base=base,
        rope_scaling=scaling,
        max_positions=max_positions,
        tied=config.flag("tie_word_embeddings"),
        qkv_bias=qwen2 or attention_bias,
        o_bias=attention_bias,
        mlp_bias=llama and config.flag("mlp_bias"),
        qk_norm=architecture == "Qwen3ForCausalLM",
        dtype=_dtype(config),
        eos_token_ids=eos,
        bos_token_id=bos,
    )


def _architecture(config: Fields) -> str:
    names = config.texts("architectures")
    if not names or names[0] not in SUPPORTED_ARCHITECTURES:
        raise config.wrong("architectures", names, ", ".join(SUPPORTED_ARCHITECTURES))
    return names[0]


def _refuse_unsupported(config: Fields) -> None:
    """Raises for what would change the numbers and is not computed here."""
    quantised = config.section("quantization_config")
    if quantised is not None:
        method = quantised.values.get("quant_method", "unknown")
        raise ModelError(f"{quantised.origin}: quantised by {method!r}; supported: {', '.join(DTYPES)}")
    activation = config.text("hidden_act", "silu")
    if activation != "silu":
        raise config.wrong("hidden_act", activation, "silu")
    if _slides(config):
        raise ModelError(f"{config.origin}: asks for sliding-window attention; supported: full attention")


def _slides(config: Fields) -> bool:
    layer_types = config.texts("layer_types")
    if layer_types:
        return any(kind != "full_attention" for kind in layer_types)
    if not config.flag("use_sliding_window") or "sliding_window" not in config:
        return False
    return config.integer("max_window_layers", 28, least=0) < config.integer("num_hidden_layers")


def _heads(config: Fields, architecture: str) -> tuple[int, int, int]:
    """Query heads, key/value heads and head size; Qwen3 must name its head size, others may leave it out."""
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    derived, rest = divmod(config.integer("hidden_size"), num_heads)
    if "head_dim" not in config and rest:
        raise config.wrong("num_attention_heads", num_heads, "a divisor of hidden_size, or head_dim given")
    head_dim = config.integer("head_dim", None if architecture == "Qwen3ForCausalLM" else derived)
    if num_heads % num_kv_heads:
        raise config.wrong("num_key_value_heads", num_kv_heads, f"a divisor of {num_heads} query heads")
    if head_dim % 2:
        raise config.wrong("head_dim", head_dim, "an even number")
    return num_heads, num_kv_heads, head_dim


def _special_tokens(path: Path, config: Fields, vocab_size: int) -> tuple[tuple[int, ...], int | None]:
    """Ids that end a text and the one that begins it; generation_config.json, if there, has the last word."""
    generation = path / "generation_config.json"
    sources = [Fields.of_file(generation)] if generation.is_file() else []
    sources.append(config)
    found = {
        key: next((ids for fields in sources if (ids := fields.token_ids(key, vocab_size))), ())
        for key in ("eos_token_id", "bos_token_id")
    }
    return found["eos_token_id"], next(iter(found["bos_token_id"]), None)


def _dtype(config: Fields) -> torch.dtype:
    key = "dtype" if "dtype" in config else "torch_dtype"
    name = config.text(key, "float32")
    if name not in DTYPES:
        raise config.wrong(key, name, ", ".join(DTYPES))
    return DTYPES[name]

"""Read a model's rotary embedding from config.json, in the layout of transformers 5 or in older ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tok_core.errors import ModelError
from tok_core.model_config.fields import Fields
from tok_kernels import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    YarnScaling,
)

DEFAULT_BASE = 10_000.0
DEFAULT_BASES = {"mixtral": 1_000_000.0}  # of families, as transformers has them
MAX_POSITIONS = (1 << 31) - 1  # positions are int32
ORIGINAL = "original_max_position_embeddings"
# The keys that each rope_type reads beside COMMON.
KEYS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "default": frozenset(),
        "linear": frozenset({"factor"}),
        "dynamic": frozenset({"factor", ORIGINAL}),
        "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", ORIGINAL}),
        "yarn": frozenset(
            {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", ORIGINAL}
        ),
        "longrope": frozenset({"factor", "attention_factor", "short_factor", "long_factor", ORIGINAL}),
    }
)
READS_ORIGINAL = frozenset({"llama3", "yarn", "longrope"})
# `finetuned` is a note by the authors of YaRN on how a checkpoint was trained.
COMMON = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"})


@dataclass(frozen=True, slots=True)
class Rope:
    """Base and scaling of a rotary embedding, and the longest context that they support."""

    base: float
    scaling: RopeScaling
    max_positions: int


def read_rope(config: Fields, family: str, head_dim: int, max_positions: int) -> Rope:
    """Return the rotary embedding of a model whose `max_position_embeddings` is `max_positions`.

    As in transformers, a non-empty `rope_scaling` replaces `rope_parameters` altogether, and a `rope_theta` inside it
    replaces the one at the top level. As in vLLM, linear, dynamic and yarn scaling multiply the context by their
    factor. Raises ModelError, which names the key, for settings that transformers would not compute or not read.
    """
    settings = _settings(config)
    kind = settings.text("rope_type", settings.text("type", "default"))
    if kind not in KEYS:
        raise settings.wrong("rope_type", kind, ", ".join(KEYS))
    if any(isinstance(value, dict) for value in settings.values.values()):
        raise ModelError(f"{settings.origin}: holds several settings; supported: one for all layers")
    for key, value in settings.values.items():
        if settings is not config and key not in KEYS[kind] | COMMON:
            keys = ", ".join(sorted(KEYS[kind] | {"rope_theta"}))
            raise settings.wrong(key, value, f"nothing, with rope_type {kind}, which reads {keys}")
    for fields in (config, settings):
        if fields.number("partial_rotary_factor", 1.0) != 1.0:
            raise fields.wrong("partial_rotary_factor", fields.values["partial_rotary_factor"], "1.0")
        read = {"rope_theta", ORIGINAL} if kind in READS_ORIGINAL else {"rope_theta"}
        for key in fields.nulls & read:  # transformers would compute with null
            raise fields.wrong(key, None, "a positive number")
    base = settings.number("rope_theta", config.number("rope_theta", DEFAULT_BASES.get(family, DEFAULT_BASE)))
    try:
        scaling, longest = _scaling(config, settings, kind, max_positions)
    except ValueError as error:
        raise ModelError(f"{settings.origin}: {error}") from None
    if not 1 <= longest <= MAX_POSITIONS:
        allowed = f"contexts of 1 to {MAX_POSITIONS} tokens, with rope scaling"
        raise config.wrong("max_position_embeddings", max_positions, allowed)
    if isinstance(scaling, YarnScaling) and base == 1:
        raise settings.wrong("rope_theta", base, "any other number, with rope_type yarn")
    if isinstance(scaling, LongRopeScaling):
        for key in ("short_factor", "long_factor"):
            if len(settings.numbers(key)) != head_dim // 2:
                raise settings.wrong(key, settings.values[key], f"{head_dim // 2} numbers, half of head_dim")
    return Rope(base, scaling, longest)


def short_prompt(scaling: RopeScaling, max_len: int) -> int | None:
    """Return the prompt length up to which rotation does not depend on the length; None if no limit below `max_len`.

    A longer prompt cannot share cached keys with a short one.
    """
    if isinstance(scaling, DynamicScaling):
        limit = scaling.max_positions
    elif isinstance(scaling, LongRopeScaling):
        limit = scaling.original_max_positions
    else:
        return None
    return limit if limit < max_len else None


def rope_depends_on_length(scaling: RopeScaling) -> bool:
    """Return whether longer prompts (`short_prompt`) share cached keys only with prompts of their own length."""
    return isinstance(scaling, DynamicScaling)


def _settings(config: Fields) -> Fields:
    """Return the object with the rotary settings; an empty object counts as absent."""
    for key in ("rope_scaling", "rope_parameters"):
        if config.values.get(key):
            settings = config.section(key)
            assert settings is not None, "the key is there"
            return settings
    return Fields(config.origin, {})


def _scaling(config: Fields, settings: Fields, kind: str, max_positions: int) -> tuple[RopeScaling, int]:
    """Return the scaling of rope_type `kind`, one of KEYS, and the longest context with it."""
    if kind == "default":
        return None, max_positions
    if kind in ("linear", "dynamic"):
        factor = settings.number("factor")
        longest = math.floor(min(max_positions * factor, MAX_POSITIONS + 1))
        if kind == "linear":
            return LinearScaling(factor), longest
        if settings.integer(ORIGINAL, max_positions) != max_positions:  # transformers would not read it
            raise settings.wrong(ORIGINAL, settings.values[ORIGINAL], f"max_position_embeddings ({max_positions})")
        return DynamicScaling(factor, max_positions), longest
    original = config.integer(ORIGINAL, settings.integer(ORIGINAL, max_positions))
    if kind == "llama3":
        scaling = Llama3Scaling(
            factor=settings.number("factor"),
            low_freq_factor=settings.number("low_freq_factor"),
            high_freq_factor=settings.number("high_freq_factor"),
            original_max_positions=original,
        )
        return scaling, max_positions
    if kind == "yarn":
        return _read_yarn(settings, original, max_positions)
    assert kind == "longrope", kind
    return _read_longrope(settings, original, max_positions), max_positions


def _read_yarn(settings: Fields, original: int, max_positions: int) -> tuple[YarnScaling, int]:
    # A factor of null means the ratio of the two lengths; an absent factor is an error.
    factor = settings.number("factor", max_positions / original if "factor" in settings.nulls else None)
    attention_factor = _mscale(factor, 1.0)
    if settings.values.get("mscale") and settings.values.get("mscale_all_dim"):
        attention_factor = _mscale(factor, settings.number("mscale")) / _mscale(
            factor, settings.number("mscale_all_dim")
        )
    scaling = YarnScaling(
        factor=factor,
        original_max_positions=original,
        attention_factor=settings.number("attention_factor", attention_factor),
        beta_fast=settings.number("beta_fast", 32.0),
        beta_slow=settings.number("beta_slow", 1.0),
        truncate=settings.flag("truncate", True),
    )
    return scaling, math.floor(min(original * factor, MAX_POSITIONS + 1))


def _mscale(factor: float, mscale: float) -> float:
    """Return YaRN's attention scale `0.1 · mscale · ln(factor) + 1`, or 1 for factors up to 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _read_longrope(settings: Fields, original: int, max_positions: int) -> LongRopeScaling:
    if original < 2:
        raise settings.wrong(ORIGINAL, original, "an integer of at least 2, with rope_type longrope")
    factor = settings.number("factor", max_positions / original)
    attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongRopeScaling(
        short_factors=settings.numbers("short_factor"),
        long_factors=settings.numbers("long_factor"),
        original_max_positions=original,
        attention_factor=settings.number("attention_factor", attention_factor),
    )

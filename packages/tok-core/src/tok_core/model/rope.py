"""Reads how a model's rotary embedding is set, in the form transformers 5 writes and in the older one."""

from __future__ import annotations

from tok_core.errors import ModelError
from tok_core.model.fields import Fields
from tok_kernels import Llama3Scaling

DEFAULT_BASE = 10_000.0
SUPPORTED = "default, llama3"


def read_rope(config: Fields, max_positions: int) -> tuple[float, Llama3Scaling | None]:
    """Base and scaling from `rope_parameters` (v5) or `rope_theta` and `rope_scaling` (v4).

    Raises ModelError for other types than SUPPORTED. Without `original_max_position_embeddings` a scaling
    counts from `max_positions`, as in transformers.
    """
    settings = config.section("rope_parameters") or config.section("rope_scaling")
    if settings is None:
        settings = Fields(config.origin, {})
    if any(isinstance(value, dict) for value in settings.values.values()):
        raise ModelError(f"{settings.origin}: holds several settings; supported: one for all layers")
    for fields in (config, settings):
        if fields.number("partial_rotary_factor", 1.0) != 1.0:
            raise fields.wrong("partial_rotary_factor", fields.values["partial_rotary_factor"], "1.0")
    base = settings.number("rope_theta", config.number("rope_theta", DEFAULT_BASE))
    return base, _scaling(config, settings, max_positions)


def _scaling(config: Fields, settings: Fields, max_positions: int) -> Llama3Scaling | None:
    kind = settings.text("rope_type", settings.text("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise settings.wrong("rope_type", kind, SUPPORTED)
    key = "original_max_position_embeddings"
    original = config.integer(key, settings.integer(key, max_positions))
    low, high = settings.number("low_freq_factor"), settings.number("high_freq_factor")
    if high <= low:
        raise settings.wrong("high_freq_factor", high, f"more than low_freq_factor ({low})")
    return Llama3Scaling(
        factor=settings.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=original,
    )

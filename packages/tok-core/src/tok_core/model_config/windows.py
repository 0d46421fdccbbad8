"""Read each layer's sliding attention window from config.json, as transformers 5 does.

With a window of W the token at position p attends to the W positions from p - W + 1 to p.
"""

from __future__ import annotations

from tok_core.model_config.fields import Fields

DEFAULT_WINDOW = 4096  # positions; default of transformers for Mistral and Qwen without the key in config.json
DEFAULT_FULL_LAYERS = 28  # default of transformers for max_window_layers


def read_windows(config: Fields, family: str, num_layers: int, max_positions: int) -> tuple[int | None, ...]:
    """Return the window of each layer; None for full attention, or for a window that covers the whole context.

    Mistral and Mixtral use the window in every layer and Llama in none. Qwen uses it only with `use_sliding_window`, in
    the layers from `max_window_layers` on or in those of `layer_types`. Raises ModelError for contradictory keys.
    """
    window = _window(config, family, max_positions)
    sliding = _sliding_layers(config, family, num_layers, window)
    if window is not None and window >= max_positions:
        window = None
    return tuple(window if slides else None for slides in sliding)


def _window(config: Fields, family: str, max_positions: int) -> int | None:
    """Return the window of sliding-window layers in positions; None if no layer has one."""
    key = "sliding_window"
    use = config.flag("use_sliding_window", family in ("mistral", "mixtral"))
    if family.startswith("qwen") and not use:
        return None
    if family in ("qwen2_moe", "qwen3_moe"):  # which layers have the window differs between the two, and from Qwen
        raise config.wrong("use_sliding_window", True, "false (of models with experts)")
    window = None
    if key not in config.nulls and (key in config or family not in ("llama", "mixtral")):
        window = config.integer(key, DEFAULT_WINDOW)
    if family == "llama" and use:
        raise config.wrong("use_sliding_window", True, "false (Llama has no sliding window)")
    if family == "llama" and window is not None and window < max_positions and "use_sliding_window" not in config:
        raise config.wrong(key, window, "null, or use_sliding_window false (Llama has no sliding window)")
    if family in ("mistral", "mixtral") and window is not None and not use:
        raise config.wrong("use_sliding_window", False, f"true, or sliding_window null (it is {window})")
    return None if family == "llama" else window


def _sliding_layers(config: Fields, family: str, num_layers: int, window: int | None) -> list[bool]:
    """Return for each layer whether it uses the sliding window."""
    types = config.texts("layer_types")
    if not types:
        if window is None or family in ("mistral", "mixtral"):
            return [window is not None] * num_layers
        full = config.integer("max_window_layers", DEFAULT_FULL_LAYERS, minimum=0)
        return [layer >= full for layer in range(num_layers)]
    allowed = "full_attention" if family == "llama" or window is None else "full_attention, sliding_attention"
    if family in ("mistral", "mixtral") and window is not None:
        allowed = "sliding_attention"  # transformers' Mistral uses the window in every layer
    for kind in types:
        if kind not in allowed.split(", "):
            without = " (there is no sliding_window in use)" if window is None else ""
            raise config.wrong("layer_types", types, f"{allowed}{without}")
    if len(types) != num_layers:
        raise config.wrong("layer_types", types, f"one entry for each of {num_layers} layers")
    return [kind == "sliding_attention" for kind in types]

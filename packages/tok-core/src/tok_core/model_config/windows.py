"""Read which layers attend to how many positions (sliding-window attention), as transformers 5 reads it.

A window of W lets the token at position p see the W positions from p - W + 1 to p.
"""

from __future__ import annotations

from tok_core.model_files import Fields

DEFAULT_WINDOW = 4096  # transformers' for Mistral and Qwen, where config.json has no such key
DEFAULT_FULL_LAYERS = 28  # its max_window_layers


def read_windows(config: Fields, family: str, num_layers: int, max_positions: int) -> tuple[int | None, ...]:
    """The window of each layer, None where it sees all positions or the window holds the whole context.

    Mistral slides in every layer, Qwen in those from `max_window_layers` on or those of `layer_types`, where
    `use_sliding_window` is set, and Llama in none. Raises ModelError for keys that contradict each other.
    """
    window = _window(config, family, max_positions)
    sliding = _sliding_layers(config, family, num_layers, window)
    if window is not None and window >= max_positions:
        window = None
    return tuple(window if slides else None for slides in sliding)


def _window(config: Fields, family: str, max_positions: int) -> int | None:
    """How many positions sliding layers see; None: no layer slides."""
    key = "sliding_window"
    use = config.flag("use_sliding_window", family == "mistral")
    if family in ("qwen2", "qwen3") and not use:
        return None
    window = None
    if key not in config.nulls and (key in config or family != "llama"):
        window = config.integer(key, DEFAULT_WINDOW)
    if family == "llama" and use:
        raise config.wrong("use_sliding_window", True, "false (Llama has no sliding window)")
    if family == "llama" and window is not None and window < max_positions and "use_sliding_window" not in config:
        raise config.wrong(key, window, "null, or use_sliding_window false (Llama has no sliding window)")
    if family == "mistral" and window is not None and not use:
        raise config.wrong("use_sliding_window", False, f"true, or sliding_window null (it is {window})")
    return None if family == "llama" else window


def _sliding_layers(config: Fields, family: str, num_layers: int, window: int | None) -> list[bool]:
    """Which layers slide."""
    types = config.texts("layer_types")
    if not types:
        if window is None or family == "mistral":
            return [window is not None] * num_layers
        full = config.integer("max_window_layers", DEFAULT_FULL_LAYERS, least=0)
        return [layer >= full for layer in range(num_layers)]
    allowed = "full_attention" if family == "llama" or window is None else "full_attention, sliding_attention"
    if family == "mistral" and window is not None:
        allowed = "sliding_attention"  # which transformers' Mistral does in every layer
    for kind in types:
        if kind not in allowed.split(", "):
            without = " (there is no sliding_window in use)" if window is None else ""
            raise config.wrong("layer_types", types, f"{allowed}{without}")
    if len(types) != num_layers:
        raise config.wrong("layer_types", types, f"one entry for each of {num_layers} layers")
    return [kind == "sliding_attention" for kind in types]

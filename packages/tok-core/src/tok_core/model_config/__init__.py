"""Find a model's directory, and read its shape and settings from the JSON files in it.

`Fields`, `resolve` and `resolve_tokenizer` load no torch: the engine's process uses them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tok_core.model_config.fields import Fields
from tok_core.model_config.hub import resolve, resolve_draft, resolve_tokenizer

if TYPE_CHECKING:
    from tok_core.model_config.model_config import ModelConfig, read_config, read_head
    from tok_core.model_config.rope import rope_depends_on_length, short_prompt

__all__ = [
    "Fields",
    "ModelConfig",
    "read_config",
    "read_head",
    "resolve",
    "resolve_draft",
    "resolve_tokenizer",
    "rope_depends_on_length",
    "short_prompt",
]


def __getattr__(name: str) -> object:
    # Deferred, because these modules load torch.
    if name in __all__:
        from tok_core.model_config import model_config, rope

        return getattr(rope if name in ("rope_depends_on_length", "short_prompt") else model_config, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

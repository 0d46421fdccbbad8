"""Read a model's shape and settings from the JSON files in its directory."""

from __future__ import annotations

from tok_core.model_config.model_config import ModelConfig, read_config
from tok_core.model_config.rope import short_prompt

__all__ = [
    "ModelConfig",
    "read_config",
    "short_prompt",
]

"""Models: what one is, which class computes it, and where its weights come from."""

from __future__ import annotations

from tok_core.models.config.model_config import ModelConfig, read_config
from tok_core.models.decoder import CausalLM
from tok_core.models.registry import ARCHITECTURES, build
from tok_core.models.weights.dummy import dummy
from tok_core.models.weights.loading import load

__all__ = ["ARCHITECTURES", "CausalLM", "ModelConfig", "build", "dummy", "load", "read_config"]

"""Models: what one is, which class computes it, and where its weights come from."""

from __future__ import annotations

from tok_core.model.config import ModelConfig, read_config
from tok_core.model.decoder import CausalLM
from tok_core.model.noise import dummy
from tok_core.model.registry import ARCHITECTURES, build
from tok_core.model.weights import load

__all__ = ["ARCHITECTURES", "CausalLM", "ModelConfig", "build", "dummy", "load", "read_config"]

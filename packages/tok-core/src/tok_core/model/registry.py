"""Which class computes which architecture."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from tok_core.errors import ModelError
from tok_core.model.config import ModelConfig
from tok_core.model.decoder import CausalLM
from tok_core.model.layers import Placement
from tok_core.model.llama import LlamaForCausalLM
from tok_core.model.qwen2 import Qwen2ForCausalLM
from tok_core.model.qwen3 import Qwen3ForCausalLM
from tok_kernels import Backend

ARCHITECTURES: Mapping[str, type[CausalLM]] = MappingProxyType(
    {model.__name__: model for model in (LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)}
)


def build(config: ModelConfig, backend: Backend, device: torch.device, dtype: torch.dtype) -> CausalLM:
    """The model of `config`, parameters uninitialised, of `dtype` on `device`. Unknown one: ModelError."""
    if config.architecture not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise ModelError(f"architecture is {config.architecture!r}; supported: {supported}")
    return ARCHITECTURES[config.architecture](config, Placement(backend, device, dtype)).eval()

"""Qwen3, dense (Yang et al. 2025): Llama with every query and key head normed before its rotation."""

from __future__ import annotations

from tok_core.model_config import ModelConfig
from tok_core.models.decoder import CausalLM, DecoderLayer
from tok_core.models.layers import Attention, Placement


class Qwen3Layer(DecoderLayer):
    """Decoder layer with grouped-query attention, normed queries and keys, and SwiGLU."""

    def attention(self, config: ModelConfig, placement: Placement) -> Attention:
        return Attention(config, placement, qkv_bias=config.qkv_bias, o_bias=config.o_bias, qk_norm=True)


class Qwen3ForCausalLM(CausalLM):
    """Qwen3 of any size without experts."""

    layer = Qwen3Layer

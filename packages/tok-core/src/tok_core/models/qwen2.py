"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama with biases on queries, keys and values."""

from __future__ import annotations

from tok_core.model_config import ModelConfig
from tok_core.models.decoder import CausalLM, DecoderLayer
from tok_core.models.layers import Attention, Placement


class Qwen2Layer(DecoderLayer):
    """Decoder layer with grouped-query attention, biased QKV projections and SwiGLU."""

    def attention(self, config: ModelConfig, placement: Placement) -> Attention:
        return Attention(config, placement, qkv_bias=True, o_bias=False, qk_norm=False)


class Qwen2ForCausalLM(CausalLM):
    """Qwen2 and Qwen2.5, dense."""

    layer = Qwen2Layer

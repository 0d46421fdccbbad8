"""Llama (Touvron et al. 2023; Grattafiori et al. 2024): the plain decoder, with biases only if its config sets them."""

from __future__ import annotations

from tok_core.model_config import ModelConfig
from tok_core.models.decoder import CausalLM, DecoderLayer
from tok_core.models.layers import MLP, Attention, Placement


class LlamaLayer(DecoderLayer):
    """Decoder layer with grouped-query attention and SwiGLU."""

    def attention(self, config: ModelConfig, placement: Placement) -> Attention:
        return Attention(config, placement, qkv_bias=config.qkv_bias, o_bias=config.o_bias, qk_norm=False)

    def feed_forward(self, config: ModelConfig, placement: Placement) -> MLP:
        return MLP(config, placement, bias=config.mlp_bias)


class LlamaForCausalLM(CausalLM):
    """Llama 2, 3, 3.1, 3.2, 3.3 and models of the same structure."""

    layer = LlamaLayer

"""Llama (Touvron et al. 2023; Grattafiori et al. 2024): the plain decoder, biases only if its config asks."""

from __future__ import annotations

from tok_core.model_config import ModelConfig
from tok_core.models.decoder import CausalLM, DecoderLayer
from tok_core.models.layers import MLP, Attention, Placement


class LlamaLayer(DecoderLayer):
    """Grouped-query attention, SwiGLU."""

    def attention(self, config: ModelConfig, place: Placement) -> Attention:
        return Attention(config, place, qkv_bias=config.qkv_bias, o_bias=config.o_bias, qk_norm=False)

    def feed_forward(self, config: ModelConfig, place: Placement) -> MLP:
        return MLP(config, place, bias=config.mlp_bias)


class LlamaForCausalLM(CausalLM):
    """Llama 2, 3, 3.1, 3.2, 3.3 and models of their shape."""

    layer = LlamaLayer

"""Define mixture-of-experts models: Qwen3-MoE, Qwen2-MoE and Mixtral, dense models with other feed-forward layers."""

from __future__ import annotations

from tok_core.model_config import ModelConfig
from tok_core.models.decoder import CausalLM, DecoderLayer
from tok_core.models.experts import MixtureOfExperts
from tok_core.models.layers import MLP, Attention, FeedForward, Placement


class MoELayer(DecoderLayer):
    """Decoder layer with a mixture of experts, or with an MLP if the config says so of this layer.

    Its attention has the biases and norms that the config names.
    """

    def attention(self, config: ModelConfig, placement: Placement) -> Attention:
        return Attention(config, placement, qkv_bias=config.qkv_bias, o_bias=config.o_bias, qk_norm=config.qk_norm)

    def feed_forward(self, config: ModelConfig, placement: Placement) -> FeedForward:
        assert config.moe is not None, "the model has no experts"
        if self.number in config.moe.layers:
            return MixtureOfExperts(config, placement)
        return MLP(config, placement, bias=False)


class MixtralForCausalLM(CausalLM):
    """Mixtral 8x7B, 8x22B and models of the same structure (Jiang et al. 2024)."""

    layer = MoELayer


class Qwen2MoeForCausalLM(CausalLM):
    """Qwen1.5-MoE and Qwen2-MoE (Yang et al. 2024), with an expert that all tokens share and biased QKV projections."""

    layer = MoELayer


class Qwen3MoeForCausalLM(CausalLM):
    """Qwen3 with experts (Yang et al. 2025), whose queries and keys are normed."""

    layer = MoELayer

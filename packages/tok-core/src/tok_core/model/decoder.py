"""The pre-norm decoder that all models here share: embedding, layers on a residual stream, norm, LM head.

Axes: T tokens of the step, R rows whose logits are wanted, N hidden size, V vocabulary, L positions,
D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor, nn

from tok_core.model.config import ModelConfig
from tok_core.model.layers import MLP, Attention, Embedding, Linear, Placement, RMSNorm, Step
from tok_kernels import AttentionBatch, LayerCache, rope_table


class DecoderLayer(nn.Module, ABC):
    """Attention and MLP, each added to the residual stream it reads, normed. A model says how both are made."""

    def __init__(self, config: ModelConfig, place: Placement) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)
        self.self_attn = self.attention(config, place)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)
        self.mlp = self.feed_forward(config, place)

    @abstractmethod
    def attention(self, config: ModelConfig, place: Placement) -> Attention:
        """The model's attention."""

    def feed_forward(self, config: ModelConfig, place: Placement) -> MLP:
        """The model's MLP; without biases unless it says otherwise."""
        return MLP(config, place, bias=False)

    def forward(self, x_TN: Tensor, cache: LayerCache, step: Step) -> Tensor:
        """The residual stream, which this layer changes in place."""
        x_TN = self.self_attn(x_TN, self.input_layernorm, cache, step)
        out_TN: Tensor = self.mlp(x_TN, self.post_attention_layernorm)
        return out_TN


class Decoder(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: ModelConfig, place: Placement, layer: type[DecoderLayer]) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, place)
        self.layers = nn.ModuleList(layer(config, place) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)

    def forward(self, token_T: Tensor, caches: Sequence[LayerCache], step: Step) -> Tensor:
        """The residual stream `[T, N]`; `norm` is left to what makes logits of it."""
        x_TN: Tensor = self.embed_tokens(token_T)
        for layer, cache in zip(self.layers, caches, strict=True):
            x_TN = layer(x_TN, cache, step)
        return x_TN


class CausalLM(nn.Module):
    """A decoder with its LM head, over a paged cache.

    Parameters are uninitialised until `weights.load` or `weights.dummy` fills them. Module names are those
    of checkpoints, so that a tensor's name says where it goes.
    """

    layer: type[DecoderLayer]
    cos_sin_LD: Tensor

    def __init__(self, config: ModelConfig, place: Placement) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, place, self.layer)
        head = {"lm_head": config.vocab_size}
        self.lm_head = None if config.tied else Linear(config.hidden_size, head, place)
        table_LD = rope_table(config.head_dim, config.max_positions, config.rope_base, config.rope_scaling)
        self.register_buffer("cos_sin_LD", table_LD.to(place.device), persistent=False)

    def forward(
        self,
        token_T: Tensor,
        position_T: Tensor,
        kv_index_T: Tensor,
        caches: Sequence[LayerCache],
        batch: AttentionBatch,
        logit_row_R: Tensor | None,
    ) -> Tensor:
        """Hidden states `[R, N]` after the tokens at the rows named (None: at all T), for `logits`.

        `token_T`, `position_T`, `kv_index_T` (flat cache rows to write) and `logit_row_R` are int64; `caches`
        holds one entry a layer and receives this step's keys and values.
        """
        x_TN: Tensor = self.model(token_T, caches, Step(position_T, kv_index_T, batch, self.cos_sin_LD))
        return x_TN if logit_row_R is None else x_TN[logit_row_R]

    def logits(self, x_RN: Tensor) -> Tensor:
        """`[R, N] -> [R, V]`, in the model's dtype: the final norm and the LM head."""
        if self.lm_head is None:
            return self.model.embed_tokens.logits(x_RN, self.model.norm)
        logits_RV: Tensor = self.lm_head(x_RN, norm=self.model.norm)
        return logits_RV

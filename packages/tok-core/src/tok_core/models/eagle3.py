"""EAGLE-3 (Li et al. 2025): a head of one layer that drafts from hidden states of the target model.

The head reads the target model's residual stream at three layers; `fc` fuses them to one hidden state for each token.
The row of position p reads the hidden state of position p and the embedding of the token of position p + 1, and
predicts the token of position p + 2:

    tokens            a   b   c   →  target samples d;  hidden states h0 h1 h2
    rows of the head  (h0, b) (h1, c) (h2, d) predicts e;  then (o2, e) predicts f, with o2 the output of the last row

Axes: T rows, N hidden size of the head, V entries of its own vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tok_core.model_config import ModelConfig
from tok_core.models.decoder import CausalLM, Decoder, DecoderLayer
from tok_core.models.layers import Attention, ForwardContext, Linear, Placement, RMSNorm, TokenEmbedding
from tok_core.models.llama import LlamaLayer
from tok_core.parallel import Slice
from tok_core.quantization import AllowedRange, WeightTarget
from tok_kernels import LayerCache, write_qkv


class Eagle3Layer(LlamaLayer):
    """Llama layer whose attention reads the normed embedding and the normed hidden state side by side.

    The residual stream begins with the hidden state.
    """

    def __init__(self, config: ModelConfig, placement: Placement, number: int) -> None:
        super().__init__(config, placement, number)
        assert config.eagle3 is not None
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, placement)
        self.norm_before_residual = config.eagle3.norm_before_residual

    def attention(self, config: ModelConfig, placement: Placement) -> Attention:
        biases = {"qkv_bias": config.qkv_bias, "o_bias": config.o_bias}
        return Attention(config, placement, **biases, qk_norm=False, inputs=2 * config.hidden_size)

    def forward(self, x_TN: Tensor, cache: LayerCache, step: ForwardContext) -> Tensor:
        """Return the residual stream after this layer, from embeddings and `step.hidden_TN`, which may change."""
        layout, attention, hidden_TN = step.layout, self.self_attn, step.hidden_TN
        assert hidden_TN is not None
        if layout is not None:
            hidden_TN = layout.own_rows(hidden_TN)
        dtype = attention.qkv_proj.dtype
        normed_TN = self.hidden_norm(hidden_TN, dtype)
        both_TM = torch.cat((self.input_layernorm(x_TN, dtype), normed_TN), 1)
        if layout is not None:
            both_TM = layout.rows(both_TM, None)
        write = attention.kv_write(cache, step, x_TN.dtype)
        q_THD = write_qkv(attention.backend.rope_and_write_kv, attention.qkv_proj(both_TM), write)
        out_TF = attention.attend(q_THD, cache, step)
        residual_TN = normed_TN.to(x_TN.dtype) if self.norm_before_residual else hidden_TN
        x_TN = attention.add_output(out_TF, residual_TN, layout)
        out_TN: Tensor = self.mlp(x_TN, self.post_attention_layernorm, layout, step.batch)
        return out_TN

    def qkv_gain(self) -> Tensor:
        return torch.cat((self.input_layernorm.weight, self.hidden_norm.weight))


class Eagle3Decoder(Decoder):
    """The head's layer and norm, the embedding unless it is the target model's, and `fc`, whole on every rank."""

    def __init__(self, config: ModelConfig, placement: Placement, layer: type[DecoderLayer]) -> None:
        super().__init__(config, placement, layer)
        head = config.eagle3
        assert head is not None
        streams = Slice.whole(len(head.streams) * head.target_hidden_size)
        self.fc = Linear(streams, {"fc": Slice.whole(config.hidden_size)}, placement.within("model"))
        self.vocabulary: DraftVocabulary | None = None
        if head.maps_tokens:
            self.vocabulary = DraftVocabulary(config.vocab_size, head.target_vocab_size, placement)

    def embedding(self, config: ModelConfig, placement: Placement) -> TokenEmbedding | None:
        head = config.eagle3
        assert head is not None
        if not head.own_embedding:
            return None
        return TokenEmbedding(config, placement, placement.shard_plan.part(head.target_vocab_size))


class Eagle3LlamaForCausalLM(CausalLM):
    """EAGLE-3 head with a Llama layer. `forward` returns hidden states that the head's next rows read in turn."""

    layer = Eagle3Layer
    decoder = Eagle3Decoder
    model: Eagle3Decoder

    def target_ids(self, token_T: Tensor) -> Tensor:
        """Return the target model's ids of tokens of the head's vocabulary, int64."""
        vocabulary = self.model.vocabulary
        return token_T if vocabulary is None else vocabulary.ids[token_T.clamp(0, len(vocabulary.ids) - 1)]

    def share_embedding(self, target: CausalLM) -> None:
        """Read the target model's embedding if the head has none of its own. Call this once weights are loaded."""
        if self.model.embed_tokens is None:
            self.model.embed_tokens = target.model.embed_tokens


class DraftVocabulary(nn.Module):
    """Map from a head's tokens to the target model's, int64 `[V]`. A checkpoint stores differences, and the inverse.

    For example, the head's tokens 0, 1 and 2 are the target's 0, 5 and 6 if the checkpoint stores 0, 4, 4.
    """

    redundant = ("t2d",)

    def __init__(self, size: int, target_size: int, placement: Placement) -> None:
        super().__init__()
        self.ids = placement.parameter(size, dtype=torch.int64)
        self.target_size = target_size

    def targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Yield the name of the differences, and what they fill."""
        text = f"differences that lead to token ids from 0 to {self.target_size - 1}"
        allowed = DraftDifferences(0, self.target_size - 1, text)
        part = (Slice.whole(len(self.ids)),)
        yield "d2t", WeightTarget(self.ids, part, ("I64", "I32"), convert=target_ids, allowed=allowed)


@dataclass(frozen=True, slots=True)
class DraftDifferences(AllowedRange):
    """Range of the token ids to which differences lead."""

    def check(self, part: Tensor) -> None:
        AllowedRange.check(self, target_ids(part))


def target_ids(difference: Tensor) -> Tensor:
    """Return the token ids that a checkpoint stores as differences from 0, 1, 2, …

    >>> target_ids(torch.tensor([0, 4, 4])).tolist()
    [0, 5, 6]
    """
    return difference + torch.arange(len(difference))

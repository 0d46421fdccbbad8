"""Implement the pre-norm decoder that all models share: embedding, layers on a residual stream, norm, LM head.

Axes: T tokens of the step, R rows that get logits, N hidden size, V vocabulary, L positions, D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from tok_core.model_config import ModelConfig
from tok_core.models.layers import (
    MLP,
    Attention,
    FeedForward,
    ForwardContext,
    KVScales,
    Linear,
    Placement,
    RMSNorm,
    TokenEmbedding,
)
from tok_core.parallel import Slice, TPLayout, VocabularyShards, choose_layout
from tok_kernels import AttentionBatch, LayerCache, rope_rows, rope_table


class StreamReader(Protocol):
    """Reader of the residual stream at some layers of each forward pass.

    streams  layers whose input is read, in rising order; the number of layers stands for the output of the last one
    """

    streams: tuple[int, ...]

    def read(self, x_TA: Tensor, step: ForwardContext) -> None:
        """Read the streams of this rank's rows side by side, A = len(streams) × N."""
        ...


class DecoderLayer(nn.Module, ABC):
    """Pre-norm attention and feed-forward on the residual stream; subclasses construct both.

    `number` is the layer's index in the model; it selects the attention window.
    """

    def __init__(self, config: ModelConfig, placement: Placement, number: int) -> None:
        super().__init__()
        self.number = number
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, placement)
        self.self_attn = self.attention(config, placement.within("self_attn"))
        self.self_attn.window = config.windows[number]
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, placement)
        self.mlp = self.feed_forward(config, placement.within("mlp"))

    @abstractmethod
    def attention(self, config: ModelConfig, placement: Placement) -> Attention:
        """Construct the attention."""

    def feed_forward(self, config: ModelConfig, placement: Placement) -> FeedForward:
        """Construct the layer's second half, by default an MLP without biases."""
        return MLP(config, placement, bias=False)

    def forward(self, x_TN: Tensor, cache: LayerCache, step: ForwardContext) -> Tensor:
        """Return the residual stream after this layer; may change `x` in place."""
        x_TN = self.self_attn(x_TN, self.input_layernorm, cache, step)
        out_TN: Tensor = self.mlp(x_TN, self.post_attention_layernorm, step.layout, step.batch)
        return out_TN

    def qkv_gain(self) -> Tensor:
        """Return the weight of the norm before the QKV projection: one number for each of its columns."""
        return self.input_layernorm.weight

    def run_gemms(self, x_TN: Tensor, layout: TPLayout | None) -> Tensor:
        """Run the layer with its queries in place of the attention's result, to time and warm up its GEMMs."""
        attention = self.self_attn
        query_TF = attention.project(x_TN, self.input_layernorm, layout)[:, : attention.o_proj.inputs.count]
        x_TN = attention.add_output(query_TF.contiguous().to(x_TN.dtype), x_TN, layout)
        out_TN: Tensor = self.mlp(x_TN, self.post_attention_layernorm, layout)
        return out_TN


class Decoder(nn.Module):
    """One pipeline stage's part of embedding, layers and final norm.

    The first stage has the embedding, the last one the norm. With tied weights the last stage has the embedding, too.
    """

    def __init__(self, config: ModelConfig, placement: Placement, layer: type[DecoderLayer]) -> None:
        super().__init__()
        stage = placement.shard_plan.coordinates
        self.embed_tokens = self.embedding(config, placement)
        self.layers = nn.ModuleDict(
            {
                str(number): layer(config, placement.within(f"model.layers.{number}"), number)
                for number in placement.shard_plan.layers
            }
        )
        self.end = str(config.num_layers)  # name of the stream that leaves the last layer
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, placement) if stage.last else None

    def embedding(self, config: ModelConfig, placement: Placement) -> TokenEmbedding | None:
        """Construct the embedding; None if this stage needs none."""
        stage = placement.shard_plan.coordinates
        return TokenEmbedding(config, placement) if stage.first or (stage.last and config.tied) else None

    def forward(
        self, x_TN: Tensor, caches: Sequence[LayerCache], step: ForwardContext, reader: StreamReader | None = None
    ) -> Tensor:
        """Return the residual stream after this stage's layers; the final norm is applied together with the LM head.

        A `reader` reads the stream on the way; the stage must then have all layers.
        """
        if reader is None:
            for layer, cache in zip(self.layers.values(), caches, strict=True):
                x_TN = layer(x_TN, cache, step)
            return x_TN
        index_of = {str(layer): index for index, layer in enumerate(reader.streams)}
        read_TSN = x_TN.new_empty((len(x_TN), len(index_of), x_TN.shape[1]))  # copies: layers change `x` in place
        for (number, layer), cache in zip(self.layers.items(), caches, strict=True):
            if number in index_of:
                read_TSN[:, index_of[number]] = x_TN
            x_TN = layer(x_TN, cache, step)
        if (last := index_of.get(self.end)) is not None:
            read_TSN[:, last] = x_TN
        reader.read(read_TSN.flatten(1), step)
        return x_TN


class CausalLM(nn.Module):
    """Decoder with its LM head, over a paged cache; or one worker's shard of it.

    Parameters are uninitialised until `weights.load` or `weights.dummy` fills them. Module names equal those of
    checkpoints, so that a tensor's name identifies its parameter.

    config      of the whole model
    shard_plan  this worker's part of the model
    local       the config of that part, as attention and KV cache see it: `shard_plan.local(config)`
    shards      the rank's part of the vocabulary, for sampling from partial logits; None: logits cover all of it
    """

    layer: type[DecoderLayer]
    decoder: type[Decoder] = Decoder
    cos_sin_LD: Tensor

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        super().__init__()
        self.config, self.shard_plan, self.dtype = config, placement.shard_plan, placement.dtype
        self.local = placement.shard_plan.local(config)
        self.tensor = placement.tensor
        vocabulary = placement.shard_plan.vocabulary
        shards = None if placement.tensor is None else VocabularyShards(placement.tensor, vocabulary)
        # Partial logits are summed otherwise than whole ones, which some rows of a step may need.
        self._gathered = shards if placement.tensor is not None and placement.tensor.ordered else None
        self.shards = shards if self._gathered is None else None
        self.model = self.decoder(config, placement, self.layer)
        heads = placement.shard_plan.coordinates.last and not config.tied
        hidden = Slice.whole(config.hidden_size)
        self.lm_head = Linear(hidden, {"lm_head": vocabulary}, placement) if heads else None
        table_LD = rope_table(config.head_dim, config.max_positions, config.rope_base, config.rope_scaling)
        self.register_buffer("cos_sin_LD", table_LD.to(placement.device), persistent=False)

    def kv_scales(self) -> Tensor | None:
        """Return the checkpoint's scales of cached keys and values, float32 `[layers, 2, K]`; None if it has none."""
        scales: list[Tensor] = [module.scale for module in self.modules() if isinstance(module, KVScales)]
        return torch.stack(scales) if scales else None

    def stream_rows(self, tokens: int) -> int:
        """Return the rows of the residual stream that this rank sends to the next stage, or receives, in a step."""
        return tokens if self.tensor is None else self.tensor.rows(tokens)

    def forward(
        self,
        x: Tensor,
        position_T: Tensor,
        kv_index_T: Tensor,
        caches: Sequence[LayerCache],
        batch: AttentionBatch,
        logit_row_R: Tensor | None,
        pass_length_T: Tensor | None = None,
        *,
        reader: StreamReader | None = None,
        hidden_TN: Tensor | None = None,
    ) -> Tensor:
        """Run this stage's layers: return hidden states for `logits` at the last stage, else the residual stream.

        The last stage returns `[R, N]`, the rows `logit_row_R` (None: all T); others return `[stream_rows(T), N]`.

        x              first stage: token ids, int64 `[T]`; others: the residual stream that the stage before sent,
                       which may change in place
        position_T     int64
        kv_index_T     flat cache rows to write, int64
        caches         one entry for each layer of the stage; they receive this step's keys and values
        logit_row_R    int64
        pass_length_T  length of the forward pass that determines each token's rotation (`rope_rows`), int64; None:
                       the pass ends with the token
        reader         reads the residual stream at some layers; None: nothing reads it
        hidden_TN      hidden states of another model, whole on every rank, for a draft head; may change in place
        """
        layout = None if self.tensor is None else choose_layout(self.tensor, len(position_T))
        if self.shard_plan.coordinates.first:
            assert self.model.embed_tokens is not None
            x = self.model.embed_tokens(x, layout)
        table, row_T = self.cos_sin_LD, position_T
        if pass_length_T is not None:
            config = self.config
            rows_TD = rope_rows(config.head_dim, config.rope_base, config.rope_scaling, position_T, pass_length_T)
            # Tokens at the end of their pass have the bits that they have in steps without prefill chunks.
            last_T1 = (pass_length_T == position_T + 1).unsqueeze(1)
            table = torch.where(last_T1, table[position_T], rows_TD)
            row_T = torch.arange(len(table), device=table.device)
        x = self.model(x, caches, ForwardContext(row_T, kv_index_T, batch, table, layout, hidden_TN), reader)
        if not self.shard_plan.coordinates.last:
            return x
        if layout is not None:
            return layout.rows(x, logit_row_R)
        return x if logit_row_R is None else x[logit_row_R]

    def logits(self, x_RN: Tensor) -> Tensor:
        """Return logits `[R, N] -> [R, V]` in the model's dtype, by final norm and LM head.

        V is this rank's part of the vocabulary if there are `shards`, else all of it.
        """
        norm = self.model.norm
        assert norm is not None, "only the last stage makes logits"
        if self.lm_head is not None:
            logits_RV: Tensor = self.lm_head(x_RN, norm=norm)
        else:
            assert self.model.embed_tokens is not None
            logits_RV = self.model.embed_tokens.logits(x_RN, norm)
        return logits_RV if self._gathered is None else self._gathered.whole(logits_RV)

    def normed(self, x_RN: Tensor) -> Tensor:
        """Apply the final norm alone, `[R, N] -> [R, N]`, for callers that need hidden states."""
        assert self.model.norm is not None, "only the last stage has a final norm"
        out_RN: Tensor = self.model.norm(x_RN)
        return out_RN

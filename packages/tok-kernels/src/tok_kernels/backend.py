"""Define `Backend`, the tensor operations that models and workers call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from tok_kernels.attention.interface import Phase
from tok_kernels.batch import AttentionBatch, KVWrite, LayerCache, QKNorm, Sampled, SamplingBatch
from tok_kernels.linear.quantized_weights import PackedWeight, QuantizedRows, ScaledWeight
from tok_kernels.moe.interface import ExpertCopies, ExpertWeights, Routing
from tok_kernels.ngrams.table import NgramTable
from tok_kernels.slots.columns import DecodeRows, DraftRows, SlotColumns


class Backend(Protocol):
    """The tensor operations of one device.

    All tensors live on that device. No operation synchronises the device or knows of requests.

    Suffixes of tensor names are axes, explained in `tok_kernels.batch`. In matmuls (`linear`, `gated_linear`) K is the
    number of input features, and N or F the number of output features. L is the number of positions in the RoPE table.
    """

    @property
    def name(self) -> str:
        """The backend's name, for logs and reports."""
        ...

    @property
    def needs_host_lengths(self) -> frozenset[Phase]:
        """The attention phases whose kernels are planned on the host, such as FlashInfer's.

        A step with one of these phases must carry `AttentionBatch.host`.
        """
        ...

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can capture decode steps.

        If True, launches of a decode step depend on host-side upper bounds only, never on exact lengths. A captured
        step can thus be replayed with any lengths below the same bounds.
        """
        ...

    def max_pack_rows(self, group: int) -> int:
        """Return how many rows a pack should have at most (`AttentionBatch.packs`); 1: packs make no step faster.

        group  query heads per key/value head
        """
        ...

    def rms_norm(self, x_TN: Tensor, weight_N: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
        """Return the RMS norm of x over its last axis (Zhang & Sennrich 2019).

        The formula is `x / sqrt(mean(x²) + eps) * weight`, computed in float32. x may have any leading axes. The result
        has dtype `dtype`; None means x's dtype.
        """
        ...

    def linear(
        self,
        x_TK: Tensor,
        weight_NK: Tensor,
        bias_N: Tensor | None = None,
        *,
        norm: tuple[Tensor, float] | None = None,
        residual_TN: Tensor | None = None,
    ) -> Tensor:
        """Return `x Wᵀ + bias`, `[T, K] -> [T, N]`; x, W and bias share one dtype.

        With `norm`, a weight `[K]` and eps, the input is `rms_norm(x)`. x may then have any dtype. The normalised x is
        rounded to W's dtype or kept in float32, and the result has W's dtype.

        With `residual_TN`, the result is added to that tensor in place, and that tensor is returned.

        The kernel launched just before this call must not write W, since the GEMM may read W before that kernel ends
        (programmatic dependent launch).
        """
        ...

    def gated_linear(
        self,
        x_TK: Tensor,
        gate_up_FK: Tensor,
        bias_F: Tensor | None = None,
        *,
        norm: tuple[Tensor, float] | None = None,
    ) -> Tensor:
        """Return `silu(gate) * up` (Shazeer 2020), `[T, K] -> [T, F / 2]`.

        `[gate, up]` is `linear(x, gate_up, bias, norm=norm)`, split into halves along the last axis. The kernel
        launched just before this call must not write `gate_up_FK`, since the GEMM may read it before that kernel ends.
        """
        ...

    def scaled_linear(
        self,
        x_TK: Tensor | QuantizedRows,
        weight: ScaledWeight,
        bias_N: Tensor | None = None,
        *,
        norm: tuple[Tensor, float] | None = None,
        residual_TN: Tensor | None = None,
    ) -> Tensor:
        """Compute `linear` with an 8-bit weight (W8A8 or W8A16). The result has x's dtype; bias may have another.

        A backend may quantise x, or the normalised x, to the weight's dtype. Each token, or each token and group of
        columns if the weight has groups, then has a float32 scale that maps its largest absolute value to the largest
        value of the dtype.
        """
        ...

    def scaled_gated_linear(
        self,
        x_TK: Tensor,
        gate_up: ScaledWeight,
        bias_F: Tensor | None = None,
        *,
        norm: tuple[Tensor, float] | None = None,
        down: ScaledWeight | None = None,
    ) -> Tensor | QuantizedRows:
        """Compute `gated_linear` with an 8-bit weight; x may be quantised as in `scaled_linear`.

        `down` is the weight by which the result will be multiplied. If it is given, the result may already be quantised
        for it.
        """
        ...

    def packed_linear(
        self,
        x_TK: Tensor,
        weight: PackedWeight,
        bias_N: Tensor | None = None,
        *,
        norm: tuple[Tensor, float] | None = None,
        residual_TN: Tensor | None = None,
    ) -> Tensor:
        """Compute `linear` with a weight of packed integers of 4 or 8 bits (W4A16, W8A16).

        Whether the dequantised W is rounded to the dtype of activations depends on the backend and on T. Calls with the
        same weight must not run concurrently, since they count in `PackedWeight.split_k_counters`.
        """
        ...

    def packed_gated_linear(
        self,
        x_TK: Tensor,
        gate_up: PackedWeight,
        bias_F: Tensor | None = None,
        *,
        norm: tuple[Tensor, float] | None = None,
    ) -> Tensor:
        """Compute `gated_linear` with a weight of packed integers, as `packed_linear` does."""
        ...

    def dequantize(self, weight: PackedWeight) -> Tensor:
        """Return W `[F, K]` in the dtype of activations: `(q - zero) * scale` in float32, rounded once."""
        ...

    def select_experts(
        self,
        logits_TE: Tensor,
        top_k: int,
        *,
        normalize: bool,
        copies: ExpertCopies | None = None,
        length_D: Tensor | None = None,
    ) -> Routing:
        """Select for each token the `top_k` experts with the largest router logits, `[T, E] -> [T, top_k]`.

        An expert's weight is the softmax of the token's logits, in float32. With `normalize`, the weights of a token's
        experts are divided by their sum, which equals a softmax over their logits alone. Of equal logits, the lower
        expert comes first. The experts of a token with a NaN logit are undefined.

        With `copies` (redundant experts), the result contains slots instead of experts. Blocks of `COPY_TOKENS` tokens
        use an expert's copies in turn.

        `length_D`, int32, has the context lengths of the first D ≤ T tokens. Tokens of length 0 are padding of a CUDA
        graph. They get the expert −1, so that no weights are read for them.
        """
        ...

    def fused_experts(
        self, x_TN: Tensor, routing: Routing, weights: ExpertWeights, *, residual_TN: Tensor | None = None
    ) -> Tensor:
        """Return for each token the weighted sum of its experts' SwiGLU MLPs `down(silu(gate(x)) * up(x))`, `[T, N]`.

        The sum is accumulated in float32, in the order of the token's experts, and rounded to x's dtype once. With
        `residual_TN`, it is added to that tensor in place, and that tensor is returned.
        """
        ...

    def rope_and_write_kv(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        position_T: Tensor,
        cos_sin_LD: Tensor,
        cache: LayerCache,
        index_T: Tensor,
        norm: QKNorm | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Rotate q and k, write the rotated k and v to the cache, and return the rotated q.

        Rotary embedding (Su et al. 2021) pairs entry `i` of a head with entry `i + D / 2`, as in Llama. `position_T`
        (int64 or int32) selects rows of `cos_sin_LD`, the float32 table made by `rope_table`. With `norm`, `rms_norm`
        is applied to each head of q and k before the rotation. v is written unchanged.

        Token `t` is written to the flat cache row `index_T[t]` (int64), that is `page * page_size + offset`. If several
        tokens have the same index, the row holds any one of them. Raises RuntimeError if the cache's pages are not
        evenly spaced in memory.

        All values are computed in float32 and rounded once, to the dtype in which they are stored. `LayerCache`
        describes the conversion to float8 and int8. The result has dtype `dtype` (None: q's dtype) and may occupy the
        memory of `q_THD`.

        If the cache has scales, k and v are divided by theirs, and the rotated q is multiplied by the k_scale of its
        key/value head, as `attention` expects.
        """
        ...

    def project_and_write_kv(
        self,
        x_TK: Tensor,
        weight_NK: Tensor,
        bias_N: Tensor | None,
        write: KVWrite,
        *,
        norm: tuple[Tensor, float] | None = None,
    ) -> Tensor:
        """Compute `linear` with a QKV weight, then `rope_and_write_kv`; return the rotated q, `[T, H, D]`.

        W has the rows of H query heads, K key heads and K value heads, D rows each; K and D are the cache's. q, k and v
        may be rounded to W's dtype before the rotation, or not.
        """
        ...

    def scaled_project_and_write_kv(
        self,
        x_TK: Tensor,
        weight: ScaledWeight,
        bias_N: Tensor | None,
        write: KVWrite,
        *,
        norm: tuple[Tensor, float] | None = None,
    ) -> Tensor:
        """Compute `project_and_write_kv` with an 8-bit weight; x may be quantised as in `scaled_linear`."""
        ...

    def silu_and_mul(self, gate_up_TF: Tensor) -> Tensor:
        """Return `silu(gate) * up`, where `gate` is the first and `up` the second half of the last axis.

        `[T, 2F] -> [T, F]`, computed in float32, of the input's dtype.
        """
        ...

    def attention(
        self, q_THD: Tensor, cache: LayerCache, batch: AttentionBatch, scale: float, window: int | None = None
    ) -> Tensor:
        """Return the attention output of one step, `[T, H, D]` of q's dtype: paged, causal and grouped-query.

        `batch` describes the queries, their keys and the cascade levels. `scale` multiplies the scores. `window` is the
        number of positions that a query sees, its own included (sliding window, Beltagy et al. 2020); None means all
        positions up to its own. Keys outside all windows are not read, so a window bounds the cost.

        If the cache has scales, q must have been multiplied by k_scale, as `rope_and_write_kv` does; the result is
        multiplied by v_scale here.

        Scores, softmax and sums are float32. Cache rows that no query sees may hold NaN. The output is 0 for a query
        without keys, and for a row of q that belongs to no sequence.
        """
        ...

    def sample(self, logits_RV: Tensor, batch: SamplingBatch) -> Sampled:
        """Sample one token per row of logits (float32 or bfloat16, −inf allowed).

        The order is: masks, penalties, bias, temperature, filters. Only masks change `logits_RV` in place. A row's
        token depends on the row's logits, parameters and random key (seed, sample, position), and on no other row. If
        penalties and bias leave a row without a possible token, the row takes the token with the largest raw logit.
        Raises ValueError if `batch.top_logprobs` exceeds the vocabulary.
        """
        ...

    def decode_rows(self, slot_B: Tensor, slots: SlotColumns) -> DecodeRows:
        """Return one decode row per slot of `slot_B` (int32), and advance the slots' lengths by one.

        A row's token is its slot's last token, and its position is the slot's length before the call. The token is also
        recorded in `SlotColumns.token_of`. A slot may occur only once, unless it has ended. The row of an ended slot
        has token 0 at position 0, writes to the scratch row, and leaves the slot unchanged.
        """
        ...

    def record_sampled_tokens(self, slot_R: Tensor, token_R: Tensor, logprob_R: Tensor, slots: SlotColumns) -> Tensor:
        """Store each row's sampled token (int64) as the last token of its slot (int32), and mark slots that end.

        A slot ends if its token is an end id and its length, which is the token's position, is at least
        `SlotColumns.eos_from_position`. Return int32 `[2, R]` for the host: the tokens, and the bits of their float32
        log-probabilities.
        """
        ...

    def draft_tokens(self, drafts: DraftRows, slots: SlotColumns, ngrams: NgramTable) -> Tensor:
        """Return the drafted token of each row that verifies one, int64 `[k, n]`: the one given, or a prediction.

        A prediction follows the drafted tokens before it; −1: no context is known. Entries without a row are undefined.
        """
        ...

    def set_draft_slots(
        self, drafts: DraftRows, draft_kn: Tensor, columns: Sequence[Tensor], slots: SlotColumns
    ) -> None:
        """Let each slot of a drafted token feed it next, from `draft_kn` (int64).

        It gets the columns of the sequence that the draft continues, and its pages up to the token's position. Its
        length is that of the sequence + 1 + i for the i-th token of a draft, from 0 on. It has ended if its token is
        −1, or the sequence has ended.

        columns  all columns of slots by dtype: int64, int32 and float32, each `[·, S]`. `last_token`, `length` and
                 `ended` of `slots` are rows of them
        """
        ...

    def learn_tokens(
        self, slot_n: Tensor, count_n: Tensor, max_count: int, slots: SlotColumns, ngrams: NgramTable
    ) -> Tensor:
        """Learn which context preceded each of the last `count_n` cached tokens of slots (int32), `max_count` at most.

        Return int32 `[n]`: how many of these tokens the table predicted before the call. An ended slot learns nothing.
        """
        ...

    def predict_tokens(self, slot_n: Tensor, count: int, slots: SlotColumns, ngrams: NgramTable) -> Tensor:
        """Return `count` tokens that may follow the last token of each slot (int32): int64 `[n, count]`.

        −1 stands from the first token on for which no context is known.
        """
        ...

    def accept_drafts(self, drafts: DraftRows, draft_kn: Tensor, count_B: Tensor, slots: SlotColumns) -> Tensor:
        """Advance sequences past drafted tokens that equal the tokens sampled before them.

        Return int32 `[n]`: how many tokens of each sequence are accepted. Call this after `record_sampled_tokens`, with
        the drafted tokens that the rows have fed (int64). A drafted token after an end id is not accepted. The slot of
        a sequence takes over the last token, and the end, of the slot that fed the last accepted token, and its length
        grows by their number. By decode row, `count_B` (int32) becomes 1 + their number for a sequence, and 0 for the
        rows of drafted tokens.
        """
        ...

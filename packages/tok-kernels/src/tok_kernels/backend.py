"""Backend: the operations that a model and a worker call."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tok_kernels.attention.phases import Phase
from tok_kernels.batch import AttentionBatch, LayerCache, QKNorm, Sampled, SamplingBatch
from tok_kernels.slots.columns import DecodeRows, SlotColumns


class Backend(Protocol):
    """Numerics of one device. Tensors live on that device; nothing here synchronises it or knows of requests.

    Legend of axes: see `tok_kernels.batch`.
    """

    @property
    def name(self) -> str: ...

    @property
    def needs_host_lengths(self) -> frozenset[Phase]:
        """The phases of attention that are planned on the host: a step that has one carries `AttentionBatch.host`."""
        ...

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can record decode steps: nothing in them then depends on the host's values."""
        ...

    def rms_norm(self, x_TN: Tensor, weight_N: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
        """Root-mean-square norm over the last axis (Zhang & Sennrich 2019), computed in float32; any leading
        axes. Of `dtype`; None: of x's."""
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
        """`x Wᵀ + bias`, all of one dtype. With `norm`, a weight `[K]` and eps, of `rms_norm(x)`: it is given in the
        dtype of W, whatever x's own. A `residual` gains the product in place and is returned. What is launched just
        before must not write W, which may be read before that ends."""
        ...

    def gated_linear(
        self,
        x_TK: Tensor,
        gate_up_FK: Tensor,
        bias_F: Tensor | None = None,
        *,
        norm: tuple[Tensor, float] | None = None,
    ) -> Tensor:
        """`silu(gate) * up` (Shazeer 2020) for `[gate, up] = linear(x, gate_up, bias, norm=norm)`, split along the
        last axis: `[T, K] -> [T, F / 2]`. What is launched just before must not write gate and up."""
        ...

    def rope(self, q_THD: Tensor, k_TKD: Tensor, position_T: Tensor, cos_sin_LD: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary embedding (Su et al. 2021), halves rotated as in Llama; `cos_sin_LD` from `rope_table`,
        float32."""
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
        """`rope`, after `rms_norm` of each head where there is a `norm`, then `write_kv` of the turned keys and
        of the values; returns the turned queries, of `dtype` (None: their own), which may lie where `q_THD` did.
        Computed in float32, and rounded once, to what is written."""
        ...

    def silu_and_mul(self, gate_up_TF: Tensor) -> Tensor:
        """`silu(gate) * up` for `gate_up = [gate, up]` along the last axis: `[T, 2F] -> [T, F]`."""
        ...

    def write_kv(self, k_TKD: Tensor, v_TKD: Tensor, cache: LayerCache, index_T: Tensor) -> None:
        """Stores token `t`'s key and value at flat cache row `index_T[t]` (page × page_size + offset),
        int64."""
        ...

    def attention(
        self, q_THD: Tensor, cache: LayerCache, batch: AttentionBatch, scale: float, window: int | None = None
    ) -> Tensor:
        """Paged, causal, grouped-query attention of one step with cascade levels: `[T, H, D]` of q's dtype.

        `window` is the number of positions that a query sees, its own included ("sliding window", Beltagy et al.
        2020); None: all up to its own. Keys that no query of a program sees are not read, so that windows bound the
        cost.
        """
        ...

    def sample(self, logits_RV: Tensor, batch: SamplingBatch) -> Sampled:
        """Draws one token a row. Leaves `logits_RV` (float32 or bfloat16) unchanged."""
        ...

    def decode_rows(self, slot_B: Tensor, slots: SlotColumns) -> DecodeRows:
        """One row for each of `slot_B` (int32; each slot once but for ended ones): its slot's last token at its
        length, which grows by one, and an entry in `token_of`. An ended slot computes token 0 at position 0, writes
        to the scratch row and stays as it is."""
        ...

    def record_draws(self, slot_R: Tensor, token_R: Tensor, logprob_R: Tensor, slots: SlotColumns) -> Tensor:
        """Makes each row's token (int64) the last one of its slot (int32), and ends the slot if the token does so
        at the position it is drawn for, the slot's length. Returns int32 `[2, R]` for the host: the tokens, and the
        bits of their log-probabilities."""
        ...

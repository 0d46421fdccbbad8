"""Tensor-parallel layouts: all-reduce, sequence-parallel and overlapped (async TP), chosen by token count.

Each half of a layer (attention, MLP) begins with a norm and a column-parallel GEMM (`enter`) and ends with a
row-parallel GEMM (`leave`), whose results are summed over the ranks and added to the residual stream.

Axes: T tokens of the step, S rows of a rank, P = ranks × S ≥ T, N hidden size, F the rank's columns between a half's
two GEMMs, R rows that get logits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from tok_core.parallel.tensor import TensorParallel

if TYPE_CHECKING:
    from tok_core.models import Linear, RMSNorm

_MULTICAST_TOKENS = 2048  # torch gathers smaller steps by multicast, without overlap, unless it must return A


class TPLayout(ABC):
    """Layout of one step of `tokens` among the ranks; `replicated`: every rank holds the whole residual stream."""

    replicated = False

    def __init__(self, tensor: TensorParallel, tokens: int) -> None:
        self.tensor = tensor
        self.tokens = tokens

    @abstractmethod
    def pad(self, token_T: Tensor) -> Tensor:
        """Return the tokens whose embeddings `begin` takes, padded if the layout requires it."""

    @abstractmethod
    def begin(self, x_TN: Tensor) -> Tensor:
        """Return the residual stream from each rank's partial embeddings of the padded tokens."""

    @abstractmethod
    def enter(self, x: Tensor, norm: RMSNorm, linear: Linear) -> Tensor:
        """Return `linear(norm(x))` of all tokens, possibly followed by padding rows: `[≥ T, F]`."""

    @abstractmethod
    def leave(self, y_TF: Tensor, linear: Linear, x: Tensor) -> Tensor:
        """Return the residual stream `x` plus `linear(y)` summed over the ranks; may change `x` in place."""

    @abstractmethod
    def gather(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """Return `norm(x)` of all T tokens, for a mixture of experts."""

    @abstractmethod
    def add(self, part_TN: Tensor, x: Tensor) -> Tensor:
        """Return the residual stream `x` plus `part` summed over the ranks; may change both in place."""

    @abstractmethod
    def rows(self, x: Tensor, row_R: Tensor | None) -> Tensor:
        """Return rows `row_R` of the residual stream (None: all T), whole on every rank."""

    @abstractmethod
    def own_rows(self, x_TN: Tensor) -> Tensor:
        """Return the rank's rows, as of the residual stream, of a tensor that is whole on every rank."""


class AllReduceLayout(TPLayout):
    """All-reduce layout: whole residual stream on every rank; one all-reduce, and so one wait, per half."""

    replicated = True

    def pad(self, token_T: Tensor) -> Tensor:
        return token_T

    def begin(self, x_TN: Tensor) -> Tensor:
        return self.tensor.sum(x_TN)

    def enter(self, x: Tensor, norm: RMSNorm, linear: Linear) -> Tensor:
        out: Tensor = linear(x, norm=norm)
        return out

    def leave(self, y_TF: Tensor, linear: Linear, x: Tensor) -> Tensor:
        """Add the bias once, in rank 0's GEMM, and the residual stream in the exchange or else in rank 0's GEMM."""
        if self.tensor.exchanges(x):
            bias_N = linear.bias if self.tensor.rank == 0 else None
            return self.tensor.sum(linear.method.matmul(linear, y_TF, bias_N), x)
        if self.tensor.rank == 0:
            return self.tensor.sum(linear(y_TF, residual_TN=x))
        return self.tensor.sum(linear.method.matmul(linear, y_TF))

    def gather(self, x: Tensor, norm: RMSNorm) -> Tensor:
        out: Tensor = norm(x)
        return out

    def add(self, part_TN: Tensor, x: Tensor) -> Tensor:
        if self.tensor.exchanges(x):
            return self.tensor.sum(part_TN, x)
        if self.tensor.rank == 0:
            part_TN += x
        return self.tensor.sum(part_TN)

    def rows(self, x: Tensor, row_R: Tensor | None) -> Tensor:
        return x if row_R is None else x[row_R]

    def own_rows(self, x_TN: Tensor) -> Tensor:
        return x_TN


class SequenceParallelLayout(TPLayout):
    """Sequence-parallel layout (Korthikanti et al. 2022): each rank holds and norms S rows of the residual stream.

    Rows beyond T pad the last part. Their values are arbitrary, and no token reads them.
    """

    def pad(self, token_T: Tensor) -> Tensor:
        return functional.pad(token_T, (0, self._rows_per_rank() * self.tensor.ranks - self.tokens))

    def begin(self, x_TN: Tensor) -> Tensor:
        return self.tensor.scatter_sum(x_TN)

    def enter(self, x: Tensor, norm: RMSNorm, linear: Linear) -> Tensor:
        out: Tensor = linear(self.tensor.gather_rows(norm(x, linear.dtype)))
        return out

    def leave(self, y_TF: Tensor, linear: Linear, x: Tensor) -> Tensor:
        part_PN = y_TF.new_empty((len(x) * self.tensor.ranks, x.shape[1]))
        linear.method.matmul_into(linear, y_TF, part_PN[: len(y_TF)])
        return self._add(x, self.tensor.scatter_sum(part_PN), linear)

    def gather(self, x: Tensor, norm: RMSNorm) -> Tensor:
        return self.tensor.gather_rows(norm(x))[: self.tokens]

    def add(self, part_TN: Tensor, x: Tensor) -> Tensor:
        missing = len(x) * self.tensor.ranks - len(part_TN)
        return x.add_(self.tensor.scatter_sum(functional.pad(part_TN, (0, 0, 0, missing))))

    def rows(self, x: Tensor, row_R: Tensor | None) -> Tensor:
        if row_R is None:
            return self.tensor.gather_rows(x)[: self.tokens]
        if 2 * len(row_R) > self.tokens:  # an all-reduce moves twice the bytes of an all-gather
            return self.tensor.gather_rows(x)[row_R]
        local = row_R - self.tensor.rank * len(x)
        own = (local >= 0) & (local < len(x))
        return self.tensor.sum(x[torch.where(own, local, 0)].masked_fill_(~own.unsqueeze(1), 0))

    def own_rows(self, x_TN: Tensor) -> Tensor:
        rows = self._rows_per_rank()
        padded = functional.pad(x_TN, (0, 0, 0, rows * self.tensor.ranks - self.tokens))
        return padded[self.tensor.rank * rows : (self.tensor.rank + 1) * rows]

    def _rows_per_rank(self) -> int:
        return -(-self.tokens // self.tensor.ranks)

    @staticmethod
    def _add(x: Tensor, more: Tensor, linear: Linear) -> Tensor:
        x += more
        if linear.bias is not None:
            x += linear.bias
        return x


class OverlappedLayout(SequenceParallelLayout):
    """Sequence-parallel layout with every GEMM split by rows; one part is computed while another is transferred.

    See Wang et al. 2023, "Overlap communication with dependent computation via decomposition".
    """

    def enter(self, x: Tensor, norm: RMSNorm, linear: Linear) -> Tensor:
        _, (out_PF,) = torch.ops.symm_mem.fused_all_gather_matmul(
            norm(x, linear.dtype),
            [linear.method.dense_weight(linear).t()],
            0,
            self.tensor.name,
            return_A=self.tokens <= _MULTICAST_TOKENS,
        )
        return linear.finish(out_PF)

    def leave(self, y_TF: Tensor, linear: Linear, x: Tensor) -> Tensor:
        missing = len(x) * self.tensor.ranks - len(y_TF)
        y_PF = functional.pad(y_TF, (0, 0, 0, missing)) if missing else y_TF.contiguous()
        weight_KF = linear.method.dense_weight(linear).t()
        own = torch.ops.symm_mem.fused_matmul_reduce_scatter(y_PF, weight_KF, "sum", 0, self.tensor.name)
        return self._add(x, own, linear)


def choose_layout(tensor: TensorParallel, tokens: int) -> TPLayout:
    """Return the layout of a step of `tokens`."""
    if tensor.overlaps(tokens):
        return OverlappedLayout(tensor, tokens)
    return AllReduceLayout(tensor, tokens) if tensor.replicates(tokens) else SequenceParallelLayout(tensor, tokens)

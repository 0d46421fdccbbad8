"""Tensor-parallel layouts: all-reduce, sequence-parallel and overlapped (async TP), chosen by token count.

A half begins with a norm and a product whose outputs are cut between the ranks, and ends with one whose inputs are:
its results have to be summed over the ranks and added to the residual stream.

Axes: T tokens of the step, S rows of a rank, P = ranks × S ≥ T, N hidden size, F a rank's own part of what lies
between a half's two products, R rows whose logits are wanted.
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

_MULTICAST_TOKENS = 2048  # up to which torch gathers by multicast where it can, unless it is to return what it gathers


class TPLayout(ABC):
    """How the ranks share one step of `tokens`."""

    def __init__(self, tensor: TensorParallel, tokens: int) -> None:
        self.tensor = tensor
        self.tokens = tokens

    @abstractmethod
    def pad(self, token_T: Tensor) -> Tensor:
        """The tokens that are looked up for `begin`."""

    @abstractmethod
    def begin(self, x_TN: Tensor) -> Tensor:
        """The residual stream, of each rank's part of the embeddings of the padded tokens."""

    @abstractmethod
    def enter(self, x: Tensor, norm: RMSNorm, linear: Linear) -> Tensor:
        """`linear(norm(x))` of all tokens, and perhaps of some rows more: `[≥ T, F]`."""

    @abstractmethod
    def leave(self, y_TF: Tensor, linear: Linear, x: Tensor) -> Tensor:
        """The residual stream with `linear(y)`, summed over the ranks, added; `x` itself may be changed."""

    @abstractmethod
    def rows(self, x: Tensor, row_R: Tensor | None) -> Tensor:
        """The rows of the residual stream named, or all T, whole on every rank."""


class AllReduceLayout(TPLayout):
    """The residual stream is whole on every rank: one sum a half, and least to wait for."""

    def pad(self, token_T: Tensor) -> Tensor:
        return token_T

    def begin(self, x_TN: Tensor) -> Tensor:
        return self.tensor.sum(x_TN)

    def enter(self, x: Tensor, norm: RMSNorm, linear: Linear) -> Tensor:
        out: Tensor = linear(x, norm=norm)
        return out

    def leave(self, y_TF: Tensor, linear: Linear, x: Tensor) -> Tensor:
        """The residual stream, and the bias, come into the sum once: there, or with the first rank's product."""
        if self.tensor.exchanges(x):
            bias_N = linear.bias if self.tensor.rank == 0 else None
            return self.tensor.sum(linear.backend.linear(y_TF, linear.weight, bias_N), x)
        if self.tensor.rank == 0:
            return self.tensor.sum(linear(y_TF, residual_TN=x))
        return self.tensor.sum(linear.backend.linear(y_TF, linear.weight))

    def rows(self, x: Tensor, row_R: Tensor | None) -> Tensor:
        return x if row_R is None else x[row_R]


class SequenceParallelLayout(TPLayout):
    """Sequence-parallel (Korthikanti et al. 2022): each rank has S rows of the stream, which it alone norms.

    Rows beyond T, which fill the last rank's part, hold whatever came out; no token sees them.
    """

    def pad(self, token_T: Tensor) -> Tensor:
        return functional.pad(token_T, (0, self._own() * self.tensor.ranks - self.tokens))

    def begin(self, x_TN: Tensor) -> Tensor:
        return self.tensor.scatter_sum(x_TN)

    def enter(self, x: Tensor, norm: RMSNorm, linear: Linear) -> Tensor:
        out: Tensor = linear(self.tensor.gather_rows(norm(x, linear.weight.dtype)))
        return out

    def leave(self, y_TF: Tensor, linear: Linear, x: Tensor) -> Tensor:
        part_PN = y_TF.new_empty((len(x) * self.tensor.ranks, linear.weight.shape[0]))
        torch.mm(y_TF, linear.weight.t(), out=part_PN[: len(y_TF)])
        return self._add(x, self.tensor.scatter_sum(part_PN), linear)

    def rows(self, x: Tensor, row_R: Tensor | None) -> Tensor:
        if row_R is None:
            return self.tensor.gather_rows(x)[: self.tokens]
        if 2 * len(row_R) > self.tokens:  # a sum of rows moves twice what a gather does
            return self.tensor.gather_rows(x)[row_R]
        local = row_R - self.tensor.rank * len(x)
        own = (local >= 0) & (local < len(x))
        return self.tensor.sum(x[torch.where(own, local, 0)].masked_fill_(~own.unsqueeze(1), 0))

    def _own(self) -> int:
        return -(-self.tokens // self.tensor.ranks)

    @staticmethod
    def _add(x: Tensor, more: Tensor, linear: Linear) -> Tensor:
        x += more
        if linear.bias is not None:
            x += linear.bias
        return x


class OverlappedLayout(SequenceParallelLayout):
    """Sharded, with every product cut by rows so that one part is computed while another is on its way (Wang et al.
    2023, "Overlap communication with dependent computation via decomposition")."""

    def enter(self, x: Tensor, norm: RMSNorm, linear: Linear) -> Tensor:
        _, (out_PF,) = torch.ops.symm_mem.fused_all_gather_matmul(
            norm(x, linear.weight.dtype),
            [linear.weight.t()],
            0,
            self.tensor.name,
            return_A=self.tokens <= _MULTICAST_TOKENS,
        )
        return linear.finish(out_PF)

    def leave(self, y_TF: Tensor, linear: Linear, x: Tensor) -> Tensor:
        missing = len(x) * self.tensor.ranks - len(y_TF)
        y_PF = functional.pad(y_TF, (0, 0, 0, missing)) if missing else y_TF.contiguous()
        own = torch.ops.symm_mem.fused_matmul_reduce_scatter(y_PF, linear.weight.t(), "sum", 0, self.tensor.name)
        return self._add(x, own, linear)


def choose_layout(tensor: TensorParallel, tokens: int) -> TPLayout:
    """The one for a step of `tokens`."""
    if tensor.overlaps(tokens):
        return OverlappedLayout(tensor, tokens)
    return AllReduceLayout(tensor, tokens) if tensor.replicates(tokens) else SequenceParallelLayout(tensor, tokens)

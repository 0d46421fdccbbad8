"""Inputs of a mixture of experts: each token's experts, and the experts' stacked matrices.

Axes: T tokens, E experts, C experts of a token, N hidden size, F intermediate size of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from tok_kernels.linear.quantized_weights import PackedWeight, ScaledWeight

Weight: TypeAlias = Tensor | ScaledWeight | PackedWeight
"""A matrix, dense or quantised."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Each token's experts, the most likely first: int32 `[T, C]`, and their weights, float32 `[T, C]`.

    experts  E
    """

    expert_TC: Tensor
    weight_TC: Tensor
    experts: int


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The matrices of E experts, stacked by rows.

    gate_up  `[E × 2F, N]`: rows of expert 0's gate projection, of its up projection, then those of expert 1, …
    down     `[E × N, F]`
    """

    gate_up: Weight
    down: Weight

    def dense(self, expert: int, experts: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the matrices of one of `experts`, `[2F, N]` and `[N, F]`."""
        gate_up, down = (_dense_rows(weight, expert, experts, dtype) for weight in (self.gate_up, self.down))
        return gate_up, down


def rows_of(weight: Weight) -> int:
    """Return the number of rows of a matrix."""
    if isinstance(weight, ScaledWeight):
        return len(weight.values_NK)
    return weight.shape[0]


def _dense_rows(weight: Weight, expert: int, experts: int, dtype: torch.dtype) -> Tensor:
    count = rows_of(weight) // experts
    rows = slice(expert * count, (expert + 1) * count)
    if isinstance(weight, Tensor):
        return weight[rows]
    if isinstance(weight, ScaledWeight):
        return weight.rows(rows).dense(dtype)
    return weight.rows(rows).dense()

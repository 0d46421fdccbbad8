"""Inputs of a mixture of experts: each token's experts, and the experts' stacked matrices.

Axes: T tokens, E experts, C experts of a token, N hidden size, F intermediate size of an expert, K most copies of an
expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from tok_kernels.linear.quantized_weights import PackedWeight, ScaledWeight

Weight: TypeAlias = Tensor | ScaledWeight | PackedWeight
"""A matrix, dense or quantised."""
COPY_TOKENS = 16  # consecutive tokens that use one copy of an expert, so that small steps read no second copy


@dataclass(frozen=True, slots=True)
class Routing:
    """Each token's experts, the most likely first: int32 `[T, C]`, and their weights, float32 `[T, C]`.

    Expert −1 marks rows of no sequence, such as padding rows; no matrix is read for them.

    experts  E
    """

    expert_TC: Tensor
    weight_TC: Tensor
    experts: int


@dataclass(frozen=True, slots=True)
class ExpertCopies:
    """Slots of experts; some experts have copies in several slots (redundant experts).

    slot_EK  int32 `[E, 1 + K]`: the number of copies of each expert, and then the slots that hold them
    slots    number of slots
    """

    slot_EK: Tensor
    slots: int

    def of(self, expert_TC: Tensor) -> Tensor:
        """Return the slots that compute each token's experts, int32 `[T, C]`: blocks of tokens use copies in turn."""
        block_T1 = torch.arange(len(expert_TC), device=expert_TC.device).unsqueeze(1) // COPY_TOKENS
        expert_TC = expert_TC.long()
        return self.slot_EK[expert_TC, 1 + block_T1 % self.slot_EK[expert_TC, 0]]


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The matrices of E experts, stacked by rows, or of those that one rank holds.

    gate_up  `[E × 2F, N]`: rows of expert 0's gate projection, of its up projection, then those of expert 1, …
    down     `[E × N, F]`
    held     consecutive experts whose matrices these are; None: all. With experts 4 to 7, the first rows are those of
             expert 4. Experts that are not held add nothing to a token's result
    """

    gate_up: Weight
    down: Weight
    held: range | None = None

    def held_of(self, experts: int) -> range:
        """Return the held experts of `experts` in all."""
        return range(experts) if self.held is None else self.held

    def dense(self, expert: int, experts: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the matrices of one held expert of `experts` in all, `[2F, N]` and `[N, F]`."""
        held = self.held_of(experts)
        place = expert - held.start
        gate_up, down = (_dense_rows(weight, place, len(held), dtype) for weight in (self.gate_up, self.down))
        return gate_up, down


def rows_of(weight: Weight) -> int:
    """Return the number of rows of a matrix."""
    if isinstance(weight, ScaledWeight):
        return len(weight.values_NK)
    return weight.shape[0]


def _dense_rows(weight: Weight, place: int, experts: int, dtype: torch.dtype) -> Tensor:
    count = rows_of(weight) // experts
    rows = slice(place * count, (place + 1) * count)
    if isinstance(weight, Tensor):
        return weight[rows]
    if isinstance(weight, ScaledWeight):
        return weight.rows(rows).dense(dtype)
    return weight.rows(rows).dense()

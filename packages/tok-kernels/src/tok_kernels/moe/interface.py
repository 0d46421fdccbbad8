"""Define the inputs of a mixture of experts: each token's experts, and the experts' stacked weights.

Axes: T tokens, E experts, C experts of a token (top-k), N hidden size, F intermediate size of an expert, K maximum
copies of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from tok_kernels.linear.quantized_weights import PackedWeight, ScaledWeight

Weight: TypeAlias = Tensor | ScaledWeight | PackedWeight
"""A weight matrix, dense or quantised."""
COPY_TOKENS = 16  # consecutive tokens that use the same copy of an expert, so that small steps read only one copy


@dataclass(frozen=True, slots=True)
class Routing:
    """Each token's experts and their weights (`topk_ids` and `topk_weights` of vLLM and SGLang).

    expert_TC  int32 [T, C], the most likely expert first; −1 for padding rows, for which no weights are read
    weight_TC  float32 [T, C]
    experts    E
    """

    expert_TC: Tensor
    weight_TC: Tensor
    experts: int


@dataclass(frozen=True, slots=True)
class ExpertCopies:
    """Slots of experts (physical experts); an expert may have copies in several slots (redundant experts).

    slot_EK  int32 [E, 1 + K], the number of copies of each expert, followed by the slots that hold them
    slots    number of slots
    """

    slot_EK: Tensor
    slots: int

    def slots_of(self, expert_TC: Tensor) -> Tensor:
        """Return the slots that compute each token's experts, int32 `[T, C]`: blocks of tokens use copies in turn."""
        block_T1 = torch.arange(len(expert_TC), device=expert_TC.device).unsqueeze(1) // COPY_TOKENS
        expert_TC = expert_TC.long()
        return self.slot_EK[expert_TC, 1 + block_T1 % self.slot_EK[expert_TC, 0]]


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of all experts, or of one rank's local experts, stacked by rows (`w13_weight` and `w2_weight`).

    gate_up        [E × 2F, N]: rows of expert 0's gate projection, of its up projection, then those of expert 1, …
    down           [E × N, F]
    local_experts  consecutive experts whose weights these are; None: all. With experts 4 to 7, the first rows are those
                   of expert 4. Other experts add nothing to a token's result
    """

    gate_up: Weight
    down: Weight
    local_experts: range | None = None

    def local_range(self, experts: int) -> range:
        """Return the local experts among `experts`."""
        return range(experts) if self.local_experts is None else self.local_experts

    def dense(self, expert: int, experts: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the weights of one local expert among `experts`, dense, `[2F, N]` and `[N, F]`."""
        local = self.local_range(experts)
        index = expert - local.start
        gate_up, down = (_dense_rows(weight, index, len(local), dtype) for weight in (self.gate_up, self.down))
        return gate_up, down


def rows_of(weight: Weight) -> int:
    """Return the number of rows of a weight matrix."""
    if isinstance(weight, ScaledWeight):
        return len(weight.values_NK)
    return weight.shape[0]


def _dense_rows(weight: Weight, index: int, experts: int, dtype: torch.dtype) -> Tensor:
    """Return the rows of one of `experts` stacked matrices, dense."""
    count = rows_of(weight) // experts
    rows = slice(index * count, (index + 1) * count)
    if isinstance(weight, Tensor):
        return weight[rows]
    if isinstance(weight, ScaledWeight):
        return weight.rows(rows).dense(dtype)
    return weight.rows(rows).dense()

"""Split a model among the workers of one replica: tensor-parallel ranks within pipeline stages."""

from __future__ import annotations

from tok_core.parallel.expert_placement import ExpertPlacement
from tok_core.parallel.pipeline import Pipeline
from tok_core.parallel.pipeline_tokens import PendingTokens
from tok_core.parallel.process_groups import ProcessGroups, join
from tok_core.parallel.shard_plan import ShardPlan, Slice
from tok_core.parallel.tensor import TensorParallel, VocabularyShards
from tok_core.parallel.tp_layouts import (
    AllReduceLayout,
    OverlappedLayout,
    SequenceParallelLayout,
    TPLayout,
    choose_layout,
)

__all__ = [
    "AllReduceLayout",
    "ExpertPlacement",
    "OverlappedLayout",
    "PendingTokens",
    "Pipeline",
    "ProcessGroups",
    "SequenceParallelLayout",
    "ShardPlan",
    "Slice",
    "TPLayout",
    "TensorParallel",
    "VocabularyShards",
    "choose_layout",
    "join",
]

"""Numerics on tensors: what a model and a worker compute, on whichever device."""

from __future__ import annotations

from tok_kernels.backend import BACKENDS, Backend, choose
from tok_kernels.batch import (
    AttentionBatch,
    CascadeLevel,
    Filters,
    LayerCache,
    LogitBias,
    Penalties,
    Sampled,
    SamplingBatch,
)
from tok_kernels.merge import merge_states
from tok_kernels.rope_table import Llama3Scaling, RopeScaling, rope_table

__all__ = [
    "BACKENDS",
    "AttentionBatch",
    "Backend",
    "CascadeLevel",
    "Filters",
    "LayerCache",
    "Llama3Scaling",
    "LogitBias",
    "Penalties",
    "RopeScaling",
    "Sampled",
    "SamplingBatch",
    "choose",
    "merge_states",
    "rope_table",
]

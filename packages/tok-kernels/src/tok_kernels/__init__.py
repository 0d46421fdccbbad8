"""Provide the tensor operations that models and workers call, with one backend per kind of device."""

from __future__ import annotations

from tok_kernels.attention.interface import AttentionShape
from tok_kernels.attention.reference import merge_states
from tok_kernels.backend import Backend
from tok_kernels.backend_choice import BACKENDS, choose
from tok_kernels.batch import (
    AttentionBatch,
    CascadeLevel,
    Contexts,
    Filters,
    HostLengths,
    HostLevel,
    KVWrite,
    LayerCache,
    LogitBias,
    Masks,
    Penalties,
    QKNorm,
    Sampled,
    SamplingBatch,
    Shards,
    kv_position_bytes,
)
from tok_kernels.collectives.exchange import Exchange
from tok_kernels.linear.quantized_weights import (
    MAX_TILES,
    MAX_VALUES,
    PackedWeight,
    QuantizedRows,
    ScaledWeight,
    pack_columns,
)
from tok_kernels.moe.interface import ExpertCopies, ExpertWeights, Routing
from tok_kernels.ngrams.table import AGE_TOKENS, NgramTable
from tok_kernels.norm_rope_kv.rope_table import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    YarnScaling,
    rope_rows,
    rope_table,
)
from tok_kernels.norm_rope_kv.separate import write_qkv
from tok_kernels.sampling.top_logprobs import log_sum_exp, top_values
from tok_kernels.slots.columns import DecodeRows, DraftRows, SlotColumns

__all__ = [
    "AGE_TOKENS",
    "BACKENDS",
    "MAX_TILES",
    "MAX_VALUES",
    "AttentionBatch",
    "AttentionShape",
    "Backend",
    "CascadeLevel",
    "Contexts",
    "DecodeRows",
    "DraftRows",
    "DynamicScaling",
    "Exchange",
    "ExpertCopies",
    "ExpertWeights",
    "Filters",
    "HostLengths",
    "HostLevel",
    "KVWrite",
    "LayerCache",
    "LinearScaling",
    "Llama3Scaling",
    "LogitBias",
    "LongRopeScaling",
    "Masks",
    "NgramTable",
    "PackedWeight",
    "Penalties",
    "QKNorm",
    "QuantizedRows",
    "RopeScaling",
    "Routing",
    "Sampled",
    "SamplingBatch",
    "ScaledWeight",
    "Shards",
    "SlotColumns",
    "YarnScaling",
    "choose",
    "kv_position_bytes",
    "log_sum_exp",
    "merge_states",
    "pack_columns",
    "rope_rows",
    "rope_table",
    "top_values",
    "write_qkv",
]

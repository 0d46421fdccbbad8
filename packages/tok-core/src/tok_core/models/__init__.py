"""Implement the supported decoder models and load their weights."""

from __future__ import annotations

from tok_core.models.decoder import CausalLM, DecoderLayer, StreamReader
from tok_core.models.eagle3 import Eagle3LlamaForCausalLM
from tok_core.models.expert_balance import rebalance
from tok_core.models.experts import ExpertLoad, MixtureOfExperts
from tok_core.models.layers import ForwardContext, Linear, RMSNorm, TokenEmbedding
from tok_core.models.registry import ARCHITECTURES, build, model_bytes, weight_reads
from tok_core.models.weights import (
    IncomingWeights,
    check_checkpoint,
    fill_dummy_weights,
    load_checkpoint,
    resolve_tied_embeddings,
    tensor_names,
)

__all__ = [
    "ARCHITECTURES",
    "CausalLM",
    "DecoderLayer",
    "Eagle3LlamaForCausalLM",
    "ExpertLoad",
    "ForwardContext",
    "IncomingWeights",
    "Linear",
    "MixtureOfExperts",
    "RMSNorm",
    "StreamReader",
    "TokenEmbedding",
    "build",
    "check_checkpoint",
    "fill_dummy_weights",
    "load_checkpoint",
    "model_bytes",
    "rebalance",
    "resolve_tied_embeddings",
    "tensor_names",
    "weight_reads",
]

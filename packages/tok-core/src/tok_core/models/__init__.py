"""Implement the supported decoder models and load their weights."""

from __future__ import annotations

from tok_core.models.decoder import CausalLM, DecoderLayer
from tok_core.models.expert_balance import rebalance
from tok_core.models.experts import ExpertLoad, MixtureOfExperts
from tok_core.models.layers import Linear, RMSNorm, TokenEmbedding
from tok_core.models.registry import ARCHITECTURES, build, model_bytes, weight_reads
from tok_core.models.weights import (
    IncomingWeights,
    check_checkpoint,
    fill_dummy_weights,
    load_checkpoint,
    resolve_tied_embeddings,
)

__all__ = [
    "ARCHITECTURES",
    "CausalLM",
    "DecoderLayer",
    "ExpertLoad",
    "IncomingWeights",
    "Linear",
    "MixtureOfExperts",
    "RMSNorm",
    "TokenEmbedding",
    "build",
    "check_checkpoint",
    "fill_dummy_weights",
    "load_checkpoint",
    "model_bytes",
    "rebalance",
    "resolve_tied_embeddings",
    "weight_reads",
]

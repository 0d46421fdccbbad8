"""Find, load and shard a model's weights, or generate dummy weights."""

from __future__ import annotations

from tok_core.models.weights.checkpoint_quantization import SCHEMES, quantize_checkpoint
from tok_core.models.weights.dummy_weights import fill_dummy_weights
from tok_core.models.weights.incoming import IncomingWeights
from tok_core.models.weights.loading import (
    check_checkpoint,
    load_checkpoint,
    resolve_tied_embeddings,
    tensor_names,
)

__all__ = [
    "SCHEMES",
    "IncomingWeights",
    "check_checkpoint",
    "fill_dummy_weights",
    "load_checkpoint",
    "quantize_checkpoint",
    "resolve_tied_embeddings",
    "tensor_names",
]

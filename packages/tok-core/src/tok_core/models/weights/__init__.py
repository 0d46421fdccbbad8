"""Find, load and shard a model's weights, or generate dummy weights."""

from __future__ import annotations

from tok_core.models.weights.dummy_weights import dummy
from tok_core.models.weights.incoming import IncomingWeights
from tok_core.models.weights.loading import as_stored, check, checkpoint_files, load
from tok_core.models.weights.rounding import SCHEMES, RoundedTensor, round_checkpoint

__all__ = [
    "SCHEMES",
    "IncomingWeights",
    "RoundedTensor",
    "as_stored",
    "check",
    "checkpoint_files",
    "dummy",
    "load",
    "round_checkpoint",
]

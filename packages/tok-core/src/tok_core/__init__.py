"""The tok inference engine: `Engine` and `AsyncEngine` for use as a library, with their parameter and result types."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tok_core.config import EngineConfig
from tok_core.errors import (
    ContextLengthExceeded,
    EngineClosed,
    EngineDead,
    EngineError,
    EngineResumed,
    InvalidField,
    ModelError,
    RequestFailed,
    TokError,
)
from tok_core.outputs import Completion, Delta, EmbeddingOutput, Pooling, RequestOutput, Timings, TokenLogprob
from tok_core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tok_core.engine import AsyncEngine, Engine, RequestStream

__all__ = [
    "AsyncEngine",
    "Completion",
    "ContextLengthExceeded",
    "Delta",
    "EmbeddingOutput",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineDead",
    "EngineError",
    "EngineResumed",
    "InvalidField",
    "ModelError",
    "Pooling",
    "RequestFailed",
    "RequestOutput",
    "RequestStream",
    "SamplingParams",
    "Timings",
    "TokError",
    "TokenLogprob",
]

_ENGINE = ("AsyncEngine", "Engine", "RequestStream")


def __getattr__(name: str) -> object:
    # Deferred, so that building a configuration or a command line loads neither ZeroMQ nor torch.
    if name in _ENGINE:
        from tok_core.engine import engine

        return getattr(engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

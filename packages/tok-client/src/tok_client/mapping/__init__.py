"""`map`: answer millions of prompts with a bounded number of open requests and a resumable output file."""

from __future__ import annotations

from tok_client.mapping.iterate import AsyncMap, Map
from tok_client.mapping.options import ChatCompletionMapParams, CompletionMapParams, EmbeddingMapParams, MapOptions
from tok_client.mapping.output import SavedAnswer, read_answers
from tok_client.mapping.run import MapResult, MapRun

__all__ = [
    "AsyncMap",
    "ChatCompletionMapParams",
    "CompletionMapParams",
    "EmbeddingMapParams",
    "Map",
    "MapOptions",
    "MapResult",
    "MapRun",
    "SavedAnswer",
    "read_answers",
]

"""The resources of the API, each for both clients; their names mirror its URLs."""

from __future__ import annotations

from tok_client.resources.batches import AsyncBatches, Batches
from tok_client.resources.chat import AsyncChat, Chat
from tok_client.resources.completions import AsyncCompletions, Completions
from tok_client.resources.embeddings import AsyncEmbeddings, Embeddings
from tok_client.resources.files import AsyncFiles, Files
from tok_client.resources.models import AsyncModels, Models
from tok_client.resources.operations import AsyncOperations, Operations
from tok_client.resources.responses import AsyncResponses, Responses
from tok_client.resources.rl import RL, AsyncRL

__all__ = [
    "RL",
    "AsyncBatches",
    "AsyncChat",
    "AsyncCompletions",
    "AsyncEmbeddings",
    "AsyncFiles",
    "AsyncModels",
    "AsyncOperations",
    "AsyncRL",
    "AsyncResponses",
    "Batches",
    "Chat",
    "Completions",
    "Embeddings",
    "Files",
    "Models",
    "Operations",
    "Responses",
]

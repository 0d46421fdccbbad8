"""Make the API call for one prompt of a `map`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar, cast

from tok_client.requests import CHAT, COMPLETION, Conversation, EmbeddingParams, Object, Prompt, calls
from tok_client.transport import Call
from tok_client.types import ChatCompletion, Completion, EmbeddingList

P = TypeVar("P")
T = TypeVar("T")

Params = Mapping[str, object]


def completions_of(params: Params, extra: Object | None) -> Callable[[Prompt], Call[Completion]]:
    """Return a function from a prompt to its completion call. ValueError, TypeError: a parameter cannot be sent."""
    return _checked(lambda prompt: COMPLETION.whole({**params, "prompt": prompt}, extra), "")


def chats_of(params: Params, extra: Object | None) -> Callable[[Conversation], Call[ChatCompletion]]:
    """Return a function from a conversation to its chat call; a text becomes one user message.

    ValueError, TypeError: a parameter cannot be sent.
    """

    def call(conversation: Conversation) -> Call[ChatCompletion]:
        text = isinstance(conversation, str)
        messages = [{"role": "user", "content": conversation}] if text else conversation
        return CHAT.whole({**params, "messages": messages}, extra)

    return _checked(call, "")


def embeddings_of(params: Params, extra: Object | None) -> Callable[[Prompt], Call[EmbeddingList]]:
    """Return a function from an input to its embedding call. ValueError, TypeError: a parameter cannot be sent."""
    return _checked(lambda prompt: calls.embedding(prompt, cast(EmbeddingParams, params), extra), "")


def _checked(make: Callable[[P], Call[T]], example: P) -> Callable[[P], Call[T]]:
    """Return `make` after one trial call, so that bad parameters raise once rather than for each prompt."""
    make(example)
    return make

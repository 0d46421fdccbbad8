"""The JSON of OpenAI's completions, chat completions, models and errors, as msgspec structs.

Servers decode requests and encode responses with them; the SDK does the reverse. They follow version 2.3.0 of
OpenAI's API reference. Responses are lenient where servers differ: finish reasons are plain strings, and what
some leave out has a default.
"""

from __future__ import annotations

from tok_client.types.base import UNSET, JSONObject, Maybe, UnsetType, known_fields
from tok_client.types.chat_request import ChatCompletionRequest
from tok_client.types.chat_response import (
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    ChatMessage,
    ChatTokenLogprob,
    ChunkChoice,
    Delta,
    FunctionCallDelta,
    ToolCallDelta,
    TopLogprob,
)
from tok_client.types.common import CompletionTokensDetails, PromptTokensDetails, StreamOptions, Usage
from tok_client.types.completion import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from tok_client.types.error import ErrorBody, ErrorResponse
from tok_client.types.messages import (
    AssistantMessage,
    AudioPart,
    ContentPart,
    CustomCall,
    CustomToolCall,
    DeveloperMessage,
    FilePart,
    FunctionCall,
    FunctionMessage,
    FunctionToolCall,
    ImagePart,
    Message,
    RefusalPart,
    SystemMessage,
    TextPart,
    ToolMessage,
    UserMessage,
)
from tok_client.types.models import Model, ModelList

__all__ = [
    "UNSET",
    "AssistantMessage",
    "AudioPart",
    "ChatChoice",
    "ChatCompletion",
    "ChatCompletionChunk",
    "ChatCompletionRequest",
    "ChatLogprobs",
    "ChatMessage",
    "ChatTokenLogprob",
    "ChunkChoice",
    "Completion",
    "CompletionChoice",
    "CompletionLogprobs",
    "CompletionRequest",
    "CompletionTokensDetails",
    "ContentPart",
    "CustomCall",
    "CustomToolCall",
    "Delta",
    "DeveloperMessage",
    "ErrorBody",
    "ErrorResponse",
    "FilePart",
    "FunctionCall",
    "FunctionCallDelta",
    "FunctionMessage",
    "FunctionToolCall",
    "ImagePart",
    "JSONObject",
    "Maybe",
    "Message",
    "Model",
    "ModelList",
    "PromptTokensDetails",
    "RefusalPart",
    "StreamOptions",
    "SystemMessage",
    "TextPart",
    "ToolCallDelta",
    "ToolMessage",
    "TopLogprob",
    "UnsetType",
    "Usage",
    "UserMessage",
    "known_fields",
]

"""The response: the items that the model wrote (reasoning, a message, function calls), and the request's parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from msgspec import field

from tok_client.types.base import UNSET, JSONObject, Maybe, Wire
from tok_client.types.batches import OutputTokensDetails
from tok_client.types.chat import ChatTokenLogprob
from tok_client.types.response_input import (
    ItemStatus,
    ReasoningTextPart,
    ResponseFormatConfig,
    ResponseText,
    ResponseTool,
    ResponseToolChoice,
    SummaryTextPart,
)


class OutputText(Wire, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """Text that the model wrote, with the log-probabilities of its tokens if requested."""

    type: ClassVar[Literal["output_text"]] = "output_text"
    text: str
    annotations: list[JSONObject] = field(default_factory=list)
    logprobs: list[ChatTokenLogprob] = field(default_factory=list)


class OutputMessage(Wire, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """A message of the model."""

    type: ClassVar[Literal["message"]] = "message"
    id: str
    status: ItemStatus
    role: str = "assistant"
    content: list[OutputText] = field(default_factory=list)


class FunctionCallItem(Wire, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A function call; `arguments` is JSON text.

    Its result is an item of type function_call_output with the same `call_id`.
    """

    type: ClassVar[Literal["function_call"]] = "function_call"
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


class ReasoningItem(Wire, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """Reasoning of the model."""

    type: ClassVar[Literal["reasoning"]] = "reasoning"
    id: str
    status: ItemStatus
    summary: list[SummaryTextPart] = field(default_factory=list)
    content: list[ReasoningTextPart] = field(default_factory=list)


OutputItem = OutputMessage | FunctionCallItem | ReasoningItem

# msgspec cannot distinguish arbitrary objects from these types; `tok_client.requests.open_items` does that.
if TYPE_CHECKING:
    AnyItem = OutputItem | JSONObject
    AnyPart = OutputText | ReasoningTextPart | JSONObject
else:
    AnyItem = OutputItem
    AnyPart = OutputText | ReasoningTextPart
"""An item or part as a server sends it: a JSON object if its type, or the type of one of its parts, is unknown."""


class IncompleteDetails(Wire, frozen=True, kw_only=True):
    """The reason why a response ended early."""

    reason: Literal["max_output_tokens", "content_filter"]


class ResponseError(Wire, frozen=True, kw_only=True):
    """The reason why a response failed."""

    code: str
    message: str


class ResponseInputDetails(Wire, frozen=True, kw_only=True):
    """The number of input tokens found in the cache, and the number of tokens charged for writing to it."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class ResponseUsage(Wire, frozen=True, kw_only=True):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: ResponseInputDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ReasoningEcho(Wire, frozen=True, kw_only=True):
    """The request's reasoning parameters."""

    effort: str | None = None
    summary: str | None = None


class Response(Wire, frozen=True, kw_only=True):
    """Response of `POST /responses`. `created_at` is in seconds since 1970.

    Members that the server leaves out have defaults.

    status  "completed"; "incomplete", with incomplete_details; "failed", with error; "in_progress" while it streams
    """

    id: str
    object: str = "response"
    created_at: int
    status: Literal["completed", "failed", "in_progress", "cancelled", "queued", "incomplete"]
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    model: str
    output: list[AnyItem] = field(default_factory=list)
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: ReasoningEcho = field(default_factory=ReasoningEcho)
    store: bool = False
    background: bool = False
    temperature: float | None = None
    text: ResponseText = field(default_factory=lambda: ResponseText(format=ResponseFormatConfig(type="text")))
    tool_choice: str | ResponseToolChoice = "auto"
    tools: list[ResponseTool] = field(default_factory=list)
    top_logprobs: int = 0
    top_p: float | None = None
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: Maybe[str] = UNSET
    safety_identifier: Maybe[str] = UNSET
    prompt_cache_key: Maybe[str] = UNSET
    metadata: dict[str, str] = field(default_factory=dict)

"""The events of a streamed response, distinguished by `type`; `sequence_number` counts them from 0."""

from __future__ import annotations

from typing import ClassVar, Literal

from tok_client.types.base import Wire
from tok_client.types.chat import ChatTokenLogprob
from tok_client.types.responses.response import AnyItem, AnyPart, Response


class ResponseCreated(Wire, frozen=True, kw_only=True, tag_field="type", tag="response.created"):
    """Event: the response has begun."""

    type: ClassVar[Literal["response.created"]] = "response.created"
    sequence_number: int
    response: Response


class ResponseInProgress(Wire, frozen=True, kw_only=True, tag_field="type", tag="response.in_progress"):
    """Event: the response is being computed."""

    type: ClassVar[Literal["response.in_progress"]] = "response.in_progress"
    sequence_number: int
    response: Response


class ResponseCompleted(Wire, frozen=True, kw_only=True, tag_field="type", tag="response.completed"):
    """Event: the response ended by itself."""

    type: ClassVar[Literal["response.completed"]] = "response.completed"
    sequence_number: int
    response: Response


class ResponseIncomplete(Wire, frozen=True, kw_only=True, tag_field="type", tag="response.incomplete"):
    """Event: the response ended early."""

    type: ClassVar[Literal["response.incomplete"]] = "response.incomplete"
    sequence_number: int
    response: Response


class ResponseFailed(Wire, frozen=True, kw_only=True, tag_field="type", tag="response.failed"):
    """Event: the response failed."""

    type: ClassVar[Literal["response.failed"]] = "response.failed"
    sequence_number: int
    response: Response


class OutputItemAdded(Wire, frozen=True, kw_only=True, tag_field="type", tag="response.output_item.added"):
    """Event: an item begins."""

    type: ClassVar[Literal["response.output_item.added"]] = "response.output_item.added"
    sequence_number: int
    output_index: int
    item: AnyItem


class OutputItemDone(Wire, frozen=True, kw_only=True, tag_field="type", tag="response.output_item.done"):
    """Event: an item has ended."""

    type: ClassVar[Literal["response.output_item.done"]] = "response.output_item.done"
    sequence_number: int
    output_index: int
    item: AnyItem


class ContentPartAdded(Wire, frozen=True, kw_only=True, tag_field="type", tag="response.content_part.added"):
    """Event: a part of an item's content begins."""

    type: ClassVar[Literal["response.content_part.added"]] = "response.content_part.added"
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    part: AnyPart


class ContentPartDone(Wire, frozen=True, kw_only=True, tag_field="type", tag="response.content_part.done"):
    """Event: a part of an item's content has ended."""

    type: ClassVar[Literal["response.content_part.done"]] = "response.content_part.done"
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    part: AnyPart


class OutputTextDelta(Wire, frozen=True, kw_only=True, tag_field="type", tag="response.output_text.delta"):
    """Event: new text of a message."""

    type: ClassVar[Literal["response.output_text.delta"]] = "response.output_text.delta"
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[ChatTokenLogprob]


class OutputTextDone(Wire, frozen=True, kw_only=True, tag_field="type", tag="response.output_text.done"):
    """Event: the whole text of a message."""

    type: ClassVar[Literal["response.output_text.done"]] = "response.output_text.done"
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[ChatTokenLogprob]


class ReasoningTextDelta(Wire, frozen=True, kw_only=True, tag_field="type", tag="response.reasoning_text.delta"):
    """Event: new reasoning text."""

    type: ClassVar[Literal["response.reasoning_text.delta"]] = "response.reasoning_text.delta"
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str


class ReasoningTextDone(Wire, frozen=True, kw_only=True, tag_field="type", tag="response.reasoning_text.done"):
    """Event: the whole reasoning text."""

    type: ClassVar[Literal["response.reasoning_text.done"]] = "response.reasoning_text.done"
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    text: str


class FunctionCallArgumentsDelta(
    Wire, frozen=True, kw_only=True, tag_field="type", tag="response.function_call_arguments.delta"
):
    """Event: new text of a call's arguments."""

    type: ClassVar[Literal["response.function_call_arguments.delta"]] = "response.function_call_arguments.delta"
    sequence_number: int
    item_id: str
    output_index: int
    delta: str


class FunctionCallArgumentsDone(
    Wire, frozen=True, kw_only=True, tag_field="type", tag="response.function_call_arguments.done"
):
    """Event: a call's whole arguments."""

    type: ClassVar[Literal["response.function_call_arguments.done"]] = "response.function_call_arguments.done"
    sequence_number: int
    item_id: str
    output_index: int
    name: str
    arguments: str


ResponseEvent = (
    ResponseCreated
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | OutputItemAdded
    | OutputItemDone
    | ContentPartAdded
    | ContentPartDone
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | FunctionCallArgumentsDelta
    | FunctionCallArgumentsDone
)

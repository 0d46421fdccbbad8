"""The events of a streamed response, distinguished by `type`; `sequence_number` counts them from 0."""

from __future__ import annotations

from typing import ClassVar, Literal

from tok_client.types.base import Wire
from tok_client.types.chat import ChatTokenLogprob
from tok_client.types.response import AnyItem, AnyPart, Response


class _Event(Wire, frozen=True, kw_only=True, tag_field="type"):
    """Base of all events."""

    sequence_number: int


class _StateEvent(_Event, frozen=True, kw_only=True):
    """Base of events that carry the whole response."""

    response: Response


class _ContentEvent(_Event, frozen=True, kw_only=True):
    """Base of events about one part of an item's content."""

    item_id: str
    output_index: int
    content_index: int


class ResponseCreated(_StateEvent, frozen=True, kw_only=True, tag="response.created"):
    """Event: the response has begun."""

    type: ClassVar[Literal["response.created"]] = "response.created"


class ResponseInProgress(_StateEvent, frozen=True, kw_only=True, tag="response.in_progress"):
    """Event: the response is being computed."""

    type: ClassVar[Literal["response.in_progress"]] = "response.in_progress"


class ResponseCompleted(_StateEvent, frozen=True, kw_only=True, tag="response.completed"):
    """Event: the response ended by itself."""

    type: ClassVar[Literal["response.completed"]] = "response.completed"


class ResponseIncomplete(_StateEvent, frozen=True, kw_only=True, tag="response.incomplete"):
    """Event: the response ended early."""

    type: ClassVar[Literal["response.incomplete"]] = "response.incomplete"


class ResponseFailed(_StateEvent, frozen=True, kw_only=True, tag="response.failed"):
    """Event: the response failed."""

    type: ClassVar[Literal["response.failed"]] = "response.failed"


class OutputItemAdded(_Event, frozen=True, kw_only=True, tag="response.output_item.added"):
    """Event: an item begins."""

    type: ClassVar[Literal["response.output_item.added"]] = "response.output_item.added"
    output_index: int
    item: AnyItem


class OutputItemDone(_Event, frozen=True, kw_only=True, tag="response.output_item.done"):
    """Event: an item has ended."""

    type: ClassVar[Literal["response.output_item.done"]] = "response.output_item.done"
    output_index: int
    item: AnyItem


class ContentPartAdded(_ContentEvent, frozen=True, kw_only=True, tag="response.content_part.added"):
    """Event: a part of an item's content begins."""

    type: ClassVar[Literal["response.content_part.added"]] = "response.content_part.added"
    part: AnyPart


class ContentPartDone(_ContentEvent, frozen=True, kw_only=True, tag="response.content_part.done"):
    """Event: a part of an item's content has ended."""

    type: ClassVar[Literal["response.content_part.done"]] = "response.content_part.done"
    part: AnyPart


class OutputTextDelta(_ContentEvent, frozen=True, kw_only=True, tag="response.output_text.delta"):
    """Event: new text of a message."""

    type: ClassVar[Literal["response.output_text.delta"]] = "response.output_text.delta"
    delta: str
    logprobs: list[ChatTokenLogprob]


class OutputTextDone(_ContentEvent, frozen=True, kw_only=True, tag="response.output_text.done"):
    """Event: the whole text of a message."""

    type: ClassVar[Literal["response.output_text.done"]] = "response.output_text.done"
    text: str
    logprobs: list[ChatTokenLogprob]


class ReasoningTextDelta(_ContentEvent, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    """Event: new reasoning text."""

    type: ClassVar[Literal["response.reasoning_text.delta"]] = "response.reasoning_text.delta"
    delta: str


class ReasoningTextDone(_ContentEvent, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    """Event: the whole reasoning text."""

    type: ClassVar[Literal["response.reasoning_text.done"]] = "response.reasoning_text.done"
    text: str


class FunctionCallArgumentsDelta(_Event, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"):
    """Event: new text of a call's arguments."""

    type: ClassVar[Literal["response.function_call_arguments.delta"]] = "response.function_call_arguments.delta"
    item_id: str
    output_index: int
    delta: str


class FunctionCallArgumentsDone(_Event, frozen=True, kw_only=True, tag="response.function_call_arguments.done"):
    """Event: a call's whole arguments."""

    type: ClassVar[Literal["response.function_call_arguments.done"]] = "response.function_call_arguments.done"
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

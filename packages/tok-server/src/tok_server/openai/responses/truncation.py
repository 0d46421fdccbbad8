"""Drop the oldest messages of a conversation that exceeds the model's length, as `truncation: "auto"` asks for.

Messages are dropped from the beginning, as few as possible. System and developer messages stay, and a tool's output is
dropped together with its call. What is left begins with a user's message, if such a conversation fits: many chat
templates refuse others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from tok_client.types import (
    AssistantMessage,
    ChatCompletionRequest,
    DeveloperMessage,
    Message,
    SystemMessage,
    ToolMessage,
    UserMessage,
)
from tok_server.openai.generation import GenerationJob, value_or_none
from tok_server.wire import CONTEXT_LENGTH_EXCEEDED, ApiError

MakeJob = Callable[[ChatCompletionRequest], GenerationJob]


def truncated_job(chat: ChatCompletionRequest, make_job: MakeJob, max_model_len: int) -> GenerationJob:
    """Return the job of the chat without its oldest messages, so that prompt and answer fit the model's length.

    If not even the newest message fits, the job, or the error, is that of the whole chat. Errors: as `make_job`.
    """

    def fitting_job(start: int) -> GenerationJob | None:
        """Return the job of the chat without the units before `start`; None if it does not fit."""
        kept = [message for message, unit in zip(chat.messages, units, strict=True) if unit is None or unit >= start]
        try:
            job = make_job(msgspec.structs.replace(chat, messages=kept))
        except ApiError as error:
            if error.code != CONTEXT_LENGTH_EXCEEDED:
                raise
            return None
        return job if len(job.prompts[0]) + (job.params.max_tokens or 1) <= max_model_len else None

    def longest_fitting(starts: Sequence[int]) -> GenerationJob | None:
        """Return the job from the first of the ascending `starts` that fits, by bisection."""
        found, low, high = None, 0, len(starts)
        while low < high:
            middle = (low + high) // 2
            job = fitting_job(starts[middle])
            if job is None:
                low = middle + 1
            else:
                found, high = job, middle
        return found

    units = _units(chat.messages)
    if (whole := fitting_job(0)) is not None:
        return whole
    of_users = [unit for unit, one in zip(units, chat.messages, strict=True) if unit and isinstance(one, UserMessage)]
    every = sorted({unit for unit in units if unit})
    return longest_fitting(of_users) or longest_fitting(every) or make_job(chat)


def _units(messages: Sequence[Message]) -> list[int | None]:
    """Return the number of each message's unit, from 0; None for messages that stay.

    A unit is a message, or a message with tool calls and the calls' outputs.
    """
    units: list[int | None] = []
    unit_of_call: dict[str, int] = {}
    count = 0
    for message in messages:
        match message:
            case SystemMessage() | DeveloperMessage():
                units.append(None)
                continue
            case ToolMessage(tool_call_id=call_id) if call_id in unit_of_call:
                units.append(unit_of_call[call_id])
                continue
            case AssistantMessage():
                unit_of_call |= {call.id: count for call in value_or_none(message.tool_calls) or ()}
        units.append(count)
        count += 1
    return units

"""Drop the oldest messages of a conversation that exceeds the model's length, as `truncation: "auto"` asks for.

Messages are dropped from the beginning, as few as possible. System and developer messages stay, and a tool's output is
dropped together with its call. What is left begins with a user's message, if such a conversation fits: many chat
templates refuse others.
"""

from __future__ import annotations

from bisect import bisect_left
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


def truncated_job(
    chat: ChatCompletionRequest,
    make_job: Callable[[ChatCompletionRequest], GenerationJob],
    count_tokens: Callable[[ChatCompletionRequest], int],
    max_model_len: int,
) -> GenerationJob:
    """Return the job of the chat without its oldest messages, so that prompt and answer fit the model's length.

    If not even the newest message fits, the job, or the error, is that of the whole chat. Errors: as `make_job`.

    count_tokens  returns the length of a chat's prompt. Errors: as `make_job`
    """
    units, room = _units(chat.messages), max_model_len - (value_or_none(chat.max_completion_tokens) or 1)

    def since(start: int) -> ChatCompletionRequest:
        """Return the chat without the units before `start`."""
        numbered = zip(chat.messages, units, strict=True)
        kept = [message for message, unit in numbered if unit is None or unit >= start]
        return msgspec.structs.replace(chat, messages=kept)

    def fits(start: int) -> bool:
        try:
            return count_tokens(since(start)) <= room
        except ApiError as error:
            if error.code == CONTEXT_LENGTH_EXCEEDED:
                return False
            raise

    try:
        job = make_job(chat)
        if len(job.prompts[0]) <= room:
            return job
    except ApiError as error:
        if error.code != CONTEXT_LENGTH_EXCEEDED:
            raise
    of_users = [unit for unit, one in zip(units, chat.messages, strict=True) if unit and isinstance(one, UserMessage)]
    every = sorted({unit for unit in units if unit})
    for starts in (of_users, every):
        index = bisect_left(starts, True, key=fits)
        if index < len(starts):
            return make_job(since(starts[index]))
    return make_job(chat)


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

"""Render a chat's messages and tools with the chat template, tokenise them, and determine the answer's markup."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from tok_client.types import ChatCompletionRequest
from tok_core import AsyncEngine, InvalidField
from tok_core.text import ChatTemplate, Tokenizer
from tok_server.limits import check_prompt_size
from tok_server.openai.chat.allowed_tools import AllowedToolCalls, allowed_tool_calls
from tok_server.openai.chat.messages import template_messages
from tok_server.openai.generation import value_or_none
from tok_server.parsing import THINK_CLOSE, THINK_OPEN, CallFormat, Markup, tool_call_format, writes_reasoning
from tok_server.settings import Formats
from tok_server.wire import ApiError, invalid

RESERVED_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt", "reasoning_effort"})


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A chat's prompt in tokens, the tools that the model may call, and the markup of its answer."""

    token_ids: list[int]
    allowed_calls: AllowedToolCalls
    markup: Markup


def chat_prompt(request: ChatCompletionRequest, engine: AsyncEngine, formats: Formats) -> ChatPrompt:
    """Return the request's prompt. Slow for long chats. Errors: ApiError naming what the model or template lacks."""
    tokenizer, template = engine.tokenizer, engine.chat_template
    if tokenizer is None or template is None:
        raise _no_template()
    allowed_calls = allowed_tool_calls(request)
    calls = _call_format(template, formats) if allowed_calls.template_tools else None
    text = _text(request, template, allowed_calls)
    markup = Markup(
        calls=calls,
        tools=frozenset(allowed_calls.allowed),
        parallel=allowed_calls.parallel,
        reasoning=writes_reasoning(formats, template),
        thinking=_ends_in_think_block(text, request),
    )
    return ChatPrompt(_tokens(text, tokenizer, engine.info.max_model_len), allowed_calls, markup)


def chat_text(request: ChatCompletionRequest, engine: AsyncEngine, formats: Formats) -> str:
    """Return the prompt as text. Errors: as `chat_prompt`."""
    template = engine.chat_template
    if template is None:
        raise _no_template()
    allowed_calls = allowed_tool_calls(request)
    if allowed_calls.template_tools:
        _call_format(template, formats)
    return _text(request, template, allowed_calls)


def _tokens(text: str, tokenizer: Tokenizer, max_model_len: int) -> list[int]:
    try:
        check_prompt_size(text, tokenizer, max_model_len, "messages")
        # The template's text already holds the special tokens.
        return tokenizer.encode(text, add_special_tokens=False)
    except InvalidField as error:
        raise invalid("messages", str(error)) from error


def _call_format(template: ChatTemplate, formats: Formats) -> CallFormat:
    if "tools" not in template.variables:
        raise _unsupported("tools", "the model's chat template does not support tools; allowed: null, []")
    calls = tool_call_format(formats, template)
    if calls is None:
        reason = "the server does not parse this model's tool calls (--tool-call-parser); allowed: null, []"
        raise _unsupported("tools", reason)
    return calls


def _text(request: ChatCompletionRequest, template: ChatTemplate, allowed_calls: AllowedToolCalls) -> str:
    messages = template_messages(request.messages)
    continues = bool(value_or_none(request.continue_final_message))
    add_generation_prompt = value_or_none(request.add_generation_prompt)
    mark = _mark_last_message(messages, add_generation_prompt) if continues else ""
    try:
        text = template.render(
            messages,
            add_generation_prompt is not False and not continues,
            list(allowed_calls.template_tools) or None,
            _variables(request, template),
        )
    except InvalidField as error:
        raise invalid("messages", str(error)) from error
    return _cut_at_mark(text, mark) if continues else text


def _mark_last_message(messages: list[dict[str, object]], add_generation_prompt: bool | None) -> str:
    """Append a mark to the last message, which the answer continues. Return the mark. Errors: ApiError."""
    if add_generation_prompt:
        raise invalid(
            "add_generation_prompt", "add_generation_prompt is true; allowed with continue_final_message: false"
        )
    last = messages[-1]
    if last["role"] != "assistant" or "tool_calls" in last:
        path = f"messages[{len(messages) - 1}].role"
        raise invalid(path, f"{path}: continue_final_message requires an assistant message with content at the end")
    mark = secrets.token_hex(16)  # random: no message can contain it
    last["content"] = f"{last['content']}{mark}"
    return mark


def _cut_at_mark(text: str, mark: str) -> str:
    before, matched, _ = text.rpartition(mark)
    if not matched:
        reason = "the model's chat template omits the last message, so that it cannot be continued"
        raise invalid("continue_final_message", f"continue_final_message: {reason}")
    return before


def _variables(request: ChatCompletionRequest, template: ChatTemplate) -> Mapping[str, object]:
    """Return the template variables that the request sets, besides messages and tools."""
    readable = template.variables - RESERVED_VARIABLES
    variables = dict(value_or_none(request.chat_template_kwargs) or {})
    for name in variables:
        if name not in readable:
            path = f"chat_template_kwargs.{name[:100]}"
            allowed = ", ".join(sorted(readable)) or "nothing"
            raise invalid(path, f"{path}: the model's chat template has no such variable; allowed: {allowed}")
    effort = value_or_none(request.reasoning_effort)
    if effort is not None:
        if "reasoning_effort" in template.variables:
            variables["reasoning_effort"] = effort
        elif effort != "none":
            reason = "the model's chat template does not support it; allowed: null, none"
            raise _unsupported("reasoning_effort", f"reasoning_effort is {effort!r}; {reason}")
        elif "enable_thinking" in readable:
            variables.setdefault("enable_thinking", False)
    return variables


def _ends_in_think_block(text: str, request: ChatCompletionRequest) -> bool:
    """Return whether the prompt ends inside a think block."""
    if value_or_none(request.continue_final_message):
        # Only marks in the continued message count, not those in other messages.
        (last,) = template_messages(request.messages[-1:])
        content = str(last["content"])
        return content.rfind(THINK_OPEN) > content.rfind(THINK_CLOSE)
    return text.rstrip().endswith(THINK_OPEN)


def _no_template() -> ApiError:
    return invalid("messages", "messages: the model has no chat template; /v1/completions takes plain prompts")


def _unsupported(path: str, reason: str) -> ApiError:
    return invalid(path, f"{path}: {reason}", "unsupported_parameter")

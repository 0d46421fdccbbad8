"""Render a chat's messages and tools with the chat template, tokenise them, and determine the answer's markup."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from tok_client.types import ChatCompletionRequest
from tok_core import AsyncEngine, InvalidField
from tok_core.text import ChatTemplate, Tokenizer
from tok_server.limits import check_size
from tok_server.openai.chat.messages import template_messages
from tok_server.openai.chat.tool_offer import AllowedToolCalls, offer
from tok_server.openai.generation import given
from tok_server.parsing import THINK_CLOSE, THINK_OPEN, CallFormat, Markup, tool_call_format, writes_reasoning
from tok_server.settings import Formats
from tok_server.wire import ApiError, invalid

OWN_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt", "reasoning_effort"})


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A chat's prompt in tokens, the tools that the model may call, and the markup of its answer."""

    token_ids: list[int]
    offer: AllowedToolCalls
    markup: Markup


def chat_prompt(request: ChatCompletionRequest, engine: AsyncEngine, formats: Formats) -> ChatPrompt:
    """Return the request's prompt. Slow for long chats. Errors: ApiError naming what the model or template lacks."""
    tokenizer, template = engine.tokenizer, engine.chat_template
    if tokenizer is None or template is None:
        raise _no_template()
    offered = offer(request)
    calls = _call_format(template, formats) if offered.shown else None
    text = _text(request, template, offered)
    markup = Markup(
        calls=calls,
        tools=frozenset(offered.allowed),
        parallel=offered.parallel,
        reasoning=writes_reasoning(formats, template),
        thinking=_thinking(text, request),
    )
    return ChatPrompt(_tokens(text, tokenizer, engine.info.max_model_len), offered, markup)


def chat_text(request: ChatCompletionRequest, engine: AsyncEngine, formats: Formats) -> str:
    """Return the prompt as text. Errors: as `chat_prompt`."""
    template = engine.chat_template
    if template is None:
        raise _no_template()
    offered = offer(request)
    if offered.shown:
        _call_format(template, formats)
    return _text(request, template, offered)


def _tokens(text: str, tokenizer: Tokenizer, max_model_len: int) -> list[int]:
    try:
        check_size(text, tokenizer, max_model_len, "messages")
        # The template's text already holds the special tokens.
        return tokenizer.encode(text, add_special_tokens=False)
    except InvalidField as error:
        raise invalid("messages", str(error)) from error


def _call_format(template: ChatTemplate, formats: Formats) -> CallFormat:
    if "tools" not in template.variables:
        raise _unsupported("tools", "the model's chat template takes no tools; allowed: null, []")
    calls = tool_call_format(formats, template)
    if calls is None:
        why = "tool calls of this model are not read (--tool-call-parser); allowed: null, []"
        raise _unsupported("tools", why)
    return calls


def _text(request: ChatCompletionRequest, template: ChatTemplate, offered: AllowedToolCalls) -> str:
    messages = template_messages(request.messages)
    goes_on = bool(given(request.continue_final_message))
    begins = given(request.add_generation_prompt)
    end = _open_end(messages, begins) if goes_on else ""
    try:
        text = template.render(
            messages, begins is not False and not goes_on, list(offered.shown) or None, _variables(request, template)
        )
    except InvalidField as error:
        raise invalid("messages", str(error)) from error
    return _up_to(text, end) if goes_on else text


def _open_end(messages: list[dict[str, object]], begins: bool | None) -> str:
    """Append a mark to the last message, which the answer continues. Return the mark. Errors: ApiError."""
    if begins:
        raise invalid("add_generation_prompt", "add_generation_prompt is true; with continue_final_message: false")
    last = messages[-1]
    if last["role"] != "assistant" or "tool_calls" in last:
        path = f"messages[{len(messages) - 1}].role"
        raise invalid(path, f"{path}: continue_final_message continues a message of the assistant with content")
    end = secrets.token_hex(16)  # random: no message can contain it
    last["content"] = f"{last['content']}{end}"
    return end


def _up_to(text: str, end: str) -> str:
    before, found, _ = text.rpartition(end)
    if not found:
        why = "the model's chat template leaves the last message out; it cannot be continued"
        raise invalid("continue_final_message", f"continue_final_message: {why}")
    return before


def _variables(request: ChatCompletionRequest, template: ChatTemplate) -> Mapping[str, object]:
    """Return the template variables that the request sets, besides messages and tools."""
    read = template.variables - OWN_VARIABLES
    found = dict(given(request.chat_template_kwargs) or {})
    for name in found:
        if name not in read:
            path = f"chat_template_kwargs.{name[:100]}"
            allowed = ", ".join(sorted(read)) or "nothing"
            raise invalid(path, f"{path}: the model's chat template does not read it; allowed: {allowed}")
    effort = given(request.reasoning_effort)
    if effort is not None:
        if "reasoning_effort" in template.variables:
            found["reasoning_effort"] = effort
        elif effort != "none":
            why = "the model's chat template takes none; allowed: null, none"
            raise _unsupported("reasoning_effort", f"reasoning_effort is {effort!r}; {why}")
        elif "enable_thinking" in read:
            found.setdefault("enable_thinking", False)
    return found


def _thinking(text: str, request: ChatCompletionRequest) -> bool:
    """Return whether the prompt ends inside a think block."""
    if given(request.continue_final_message):
        # Only marks in the continued message count, not those in other messages.
        (last,) = template_messages(request.messages[-1:])
        said = str(last["content"])
        return said.rfind(THINK_OPEN) > said.rfind(THINK_CLOSE)
    return text.rstrip().endswith(THINK_OPEN)


def _no_template() -> ApiError:
    return invalid("messages", "messages: the model has no chat template; /v1/completions takes plain prompts")


def _unsupported(path: str, why: str) -> ApiError:
    return invalid(path, f"{path}: {why}", "unsupported_parameter")

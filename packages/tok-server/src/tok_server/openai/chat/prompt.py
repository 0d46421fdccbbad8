"""Render a chat's messages and tools with the chat template, tokenise them, and determine the answer's markup."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, assert_never

import msgspec

from tok_client.types import (
    AssistantMessage,
    AudioPart,
    ChatCompletionRequest,
    CustomToolCall,
    DeveloperMessage,
    FilePart,
    FunctionMessage,
    FunctionToolCall,
    ImagePart,
    Message,
    RefusalPart,
    SystemMessage,
    TextPart,
    ToolMessage,
    UnsetType,
    UserMessage,
)
from tok_core import AsyncEngine, InvalidField
from tok_core.text import ChatTemplate, Tokenizer
from tok_server.openai.chat.tools import AllowedToolCalls, allowed_tool_calls
from tok_server.openai.generation import check_prompt_size, text_end, value_or_none
from tok_server.parsing import THINK_CLOSE, THINK_OPEN, CallFormat, Markup, hermes, llama3
from tok_server.settings import Formats
from tok_server.wire import ApiError, invalid, unsupported

if TYPE_CHECKING:
    from tok_core.text import ChatTemplate

RESERVED_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt", "reasoning_effort"})

Part = TextPart | ImagePart | AudioPart | FilePart | RefusalPart
TemplateMessage = dict[str, object]
ONLY_TEXT = "is not supported yet; allowed: text"
MAX_TEMPLATE_CHARS = 1 << 16  # characters of a request's own template; published ones have up to 20,000
MAX_MESSAGES = 8192  # messages of a chat: a template takes some microseconds for each


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A chat's prompt in tokens, the tools that the model may call, and the markup of its answer.

    `begin_count`: number of tokens before the template's text. `ignored`: fields that the template cannot express.
    """

    token_ids: list[int]
    begin_count: int
    allowed_calls: AllowedToolCalls
    markup: Markup
    ignored: tuple[str, ...]


def chat_prompt(
    request: ChatCompletionRequest, engine: AsyncEngine, formats: Formats, *, truncates: bool = False
) -> ChatPrompt:
    """Return the request's prompt. Slow for long chats. Errors: ApiError naming what the model or template lacks.

    truncates  the caller keeps only the end: of a far too long prompt, that is all that is tokenised
    """
    tokenizer = engine.tokenizer
    template = _request_template(request, engine, formats) or engine.chat_template
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
    # By default no special tokens are added: the template's text already holds them.
    special = bool(value_or_none(request.add_special_tokens))
    token_ids = _tokens(text, tokenizer, engine.info.max_model_len, special, truncates=truncates)
    begin_count = tokenizer.begin_count if special else 0
    return ChatPrompt(token_ids, begin_count, allowed_calls, markup, _ignored(request, template, markup.reasoning))


def chat_text(request: ChatCompletionRequest, engine: AsyncEngine, formats: Formats) -> str:
    """Return the prompt as text. Errors: as `chat_prompt`."""
    template = _request_template(request, engine, formats) or engine.chat_template
    if template is None:
        raise _no_template()
    allowed_calls = allowed_tool_calls(request)
    if allowed_calls.template_tools:
        _call_format(template, formats)
    return _text(request, template, allowed_calls)


def _request_template(request: ChatCompletionRequest, engine: AsyncEngine, formats: Formats) -> ChatTemplate | None:
    """Return the template that the request carries, if it has one. Errors: ApiError."""
    source = value_or_none(request.chat_template)
    if source is None:
        return None
    if not formats.trust_request_chat_template:
        reason = "is refused, since the server was started without --trust-request-chat-template; allowed: null"
        raise invalid("chat_template", f"chat_template {reason}", "unsupported_parameter")
    if len(source) > MAX_TEMPLATE_CHARS:
        allowed = f"at most {MAX_TEMPLATE_CHARS}"
        raise invalid("chat_template", f"chat_template has {len(source)} characters; allowed: {allowed}")
    if engine.tokenizer is None:
        raise _no_template()
    return _compiled(source, engine.tokenizer)


@lru_cache(maxsize=16)
def _compiled(source: str, tokenizer: Tokenizer) -> ChatTemplate:
    """Return a request's template, which may write the model's special tokens."""
    try:
        return ChatTemplate({"default": source}, tokenizer.roles)
    except Exception as error:  # the source comes from a client
        reason = f"{type(error).__name__}: {str(error)[:500]}"
        raise invalid("chat_template", f"chat_template is no template that Jinja compiles ({reason})") from error


def _tokens(
    text: str, tokenizer: Tokenizer, max_model_len: int, add_special_tokens: bool, *, truncates: bool
) -> list[int]:
    try:
        if truncates:
            text = text_end(text, tokenizer, max_model_len)
        else:
            check_prompt_size(text, tokenizer, max_model_len, "messages")
        return tokenizer.encode(text, add_special_tokens)
    except InvalidField as error:
        raise invalid("messages", str(error)) from error


def _call_format(template: ChatTemplate, formats: Formats) -> CallFormat:
    if "tools" not in template.variables:
        raise unsupported("tools", "the model's chat template does not support tools; allowed: null, []")
    calls = tool_call_format(formats, template)
    if calls is None:
        reason = "the server does not parse this model's tool calls (--tool-call-parser); allowed: null, []"
        raise unsupported("tools", reason)
    return calls


def _text(request: ChatCompletionRequest, template: ChatTemplate, allowed_calls: AllowedToolCalls) -> str:
    messages = template_messages(request.messages)
    continues = bool(value_or_none(request.continue_final_message))
    add_generation_prompt = value_or_none(request.add_generation_prompt)
    content = str(messages[-1]["content"]) if messages else ""
    mark = _mark_last_message(messages, add_generation_prompt) if continues else ""
    if template.tests_null_content:
        _set_null_content(messages)
    render = partial(
        template.render,
        add_generation_prompt=add_generation_prompt is not False and not continues,
        tools=list(allowed_calls.template_tools) or None,
        variables=_variables(request, template),
    )
    try:
        text = render(messages)
    except InvalidField as error:
        if not any("tool_calls" in message for message in messages):
            raise invalid("messages", str(error)) from error
        try:
            text = render(_with_arguments_as_text(messages, request.messages))  # as DeepSeek's templates expect
        except InvalidField:
            raise invalid("messages", str(error)) from error
    return _cut_at_mark(text, mark, content) if continues else text


def _set_null_content(messages: Sequence[TemplateMessage]) -> None:
    """Set the content of messages that only call tools to None, as the template expects it."""
    for message in messages:
        if "tool_calls" in message and not message["content"]:
            message["content"] = None


def _with_arguments_as_text(messages: Sequence[TemplateMessage], originals: Sequence[Message]) -> list[TemplateMessage]:
    """Return the messages with the arguments of calls as the request has them: as JSON text, not as objects."""
    return [
        message | {"tool_calls": msgspec.to_builtins(original.tool_calls)}
        if "tool_calls" in message and isinstance(original, AssistantMessage)
        else message
        for message, original in zip(messages, originals, strict=True)
    ]


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
    last["content"] = f"{last['content']}{mark} "  # a template that trims contents drops the space
    return mark


def _cut_at_mark(text: str, mark: str, content: str) -> str:
    """Return the text before the mark, which ends as the template writes the `content` of a last message."""
    before, matched, after = text.rpartition(mark)
    if not matched:
        reason = "the model's chat template omits the last message, so that it cannot be continued"
        raise invalid("continue_final_message", f"continue_final_message: {reason}")
    return before if after.startswith(" ") else before.removesuffix(content[len(content.rstrip()) :])


def _variables(request: ChatCompletionRequest, template: ChatTemplate) -> Mapping[str, object]:
    """Return the template variables that the request sets, besides messages and tools."""
    readable = template.variables - RESERVED_VARIABLES
    variables = dict(value_or_none(request.chat_template_kwargs) or {})
    for name in variables:
        if name not in readable:
            path = f"chat_template_kwargs.{name[:100]}"
            allowed = ", ".join(sorted(readable)) or "nothing"
            raise invalid(path, f"{path}: the model's chat template has no such variable; allowed: {allowed}")
    effort, verbosity = value_or_none(request.reasoning_effort), value_or_none(request.verbosity)
    if effort is not None and "reasoning_effort" in template.variables:
        variables["reasoning_effort"] = effort
    elif effort == "none" and "enable_thinking" in readable:
        variables.setdefault("enable_thinking", False)
    if verbosity is not None and "verbosity" in readable:
        variables.setdefault("verbosity", verbosity)
    return variables


def _ignored(request: ChatCompletionRequest, template: ChatTemplate, reasoning: bool) -> tuple[str, ...]:
    """Return the fields that the template cannot express, unless they ask for nothing else than the model does.

    reasoning  the model writes think blocks
    """
    effort, verbosity = value_or_none(request.reasoning_effort), value_or_none(request.verbosity)
    ignored = []
    switches = {"reasoning_effort", "enable_thinking"} if effort == "none" else {"reasoning_effort"}
    reasons_otherwise = effort is not None and (effort != "none" or reasoning)
    if reasons_otherwise and switches.isdisjoint(template.variables):
        ignored.append("reasoning_effort")
    if verbosity not in (None, "medium") and "verbosity" not in template.variables:
        ignored.append("verbosity")
    return tuple(ignored)


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


def template_messages(messages: Sequence[Message]) -> list[TemplateMessage]:
    """Convert all messages for the template. Errors: ApiError naming the refused field ("messages[1].audio")."""
    if len(messages) > MAX_MESSAGES:
        raise invalid("messages", f"messages holds {len(messages)} messages; allowed: at most {MAX_MESSAGES}")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Message, path: str) -> TemplateMessage:
    match message:
        case SystemMessage() | DeveloperMessage():
            # Only templates of models that were trained on the newer role "developer" know it.
            return _text_message("system", _message_text(message.content, path), value_or_none(message.name))
        case UserMessage():
            return _text_message("user", _message_text(message.content, path), value_or_none(message.name))
        case AssistantMessage():
            return _assistant(message, path)
        case ToolMessage():
            return {
                "role": "tool",
                "content": _message_text(message.content, path),
                "tool_call_id": message.tool_call_id,
            }
        case FunctionMessage():
            raise unsupported(f"{path}.role", f"role {message.role!r} is not supported yet; allowed: role 'tool'")
    assert_never(message)


def _text_message(role: str, content: str, name: str | None) -> TemplateMessage:
    name_member = {} if name is None else {"name": name}
    return {"role": role, "content": content, **name_member}


def _assistant(message: AssistantMessage, path: str) -> TemplateMessage:
    for field in ("function_call", "audio", "refusal"):
        if value_or_none(getattr(message, field)):
            raise unsupported(f"{path}.{field}", f"{field} {ONLY_TEXT}")
    calls = value_or_none(message.tool_calls) or []
    content = None if isinstance(message.content, UnsetType) else message.content
    if content is None and not calls:
        raise invalid(f"{path}.content", f"{path}.content is missing; allowed: text, or tool_calls instead")
    template_message = _text_message("assistant", _message_text(content, path), value_or_none(message.name))
    if calls:
        template_message["tool_calls"] = [
            _call(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(calls)
        ]
    reasoning = value_or_none(message.reasoning_content)
    if reasoning is not None:
        template_message["reasoning_content"] = reasoning
    return template_message


def _call(call: FunctionToolCall | CustomToolCall, path: str) -> TemplateMessage:
    if isinstance(call, CustomToolCall):
        raise unsupported(f"{path}.type", "a call of type 'custom' is not supported yet; allowed: function")
    function = {"name": call.function.name, "arguments": _arguments(call.function.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _arguments(text: str) -> object:
    """Parse the arguments into an object, as templates expect; return the text unchanged if it is no object."""
    try:
        value = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _message_text(content: str | Sequence[Part] | None, path: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = []
    for index, part in enumerate(content):
        if not isinstance(part, TextPart):
            raise unsupported(f"{path}.content[{index}].type", f"content of type {part.type!r} {ONLY_TEXT}")
        parts.append(part.text)
    return "\n".join(parts)  # as vLLM and llama.cpp do


def tool_call_format(formats: Formats, template: ChatTemplate) -> CallFormat | None:
    """Return the format in which the model writes tool calls; None: they are not parsed."""
    if formats.tool_calls != "auto":
        return None if formats.tool_calls == "none" else formats.tool_calls
    if template.mentions(hermes.OPEN):
        return "hermes"
    # Llama 3's templates mention the tag before calls, or the role of tool results, "ipython".
    return "llama3" if template.mentions(llama3.TAG) or template.mentions("ipython") else None


def writes_reasoning(formats: Formats, template: ChatTemplate) -> bool:
    """Return whether the model writes think blocks."""
    return formats.reasoning == "qwen3" or (formats.reasoning == "auto" and template.mentions(THINK_CLOSE))

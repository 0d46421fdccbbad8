"""Translate a /v1/responses request into a chat request, and the chat's field names back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec

from tok_client.types import (
    UNSET,
    AllowedTools,
    ChatCompletionRequest,
    FunctionDefinition,
    FunctionName,
    FunctionTool,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    Maybe,
    NamedFunction,
    ResponseFormat,
    ResponseFormatConfig,
    ResponseRequest,
    ResponseTool,
    ResponseToolChoice,
    Tool,
    ToolChoice,
    ToolSubset,
    UnsetType,
)
from tok_server.openai.generation import required, value_or_none
from tok_server.openai.responses.conversation import messages_of
from tok_server.wire import ApiError, invalid

T = TypeVar("T")

INCLUDE_LOGPROBS = "message.output_text.logprobs"
IRRELEVANT_INCLUDES = frozenset(
    {
        "reasoning.encrypted_content",  # reasoning is returned as text, which can be sent back
        # Other values add to items of built-in tools, images and computers, of which there are none.
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)

# Fields with the same name and meaning in a chat.
SHARED_FIELDS = (
    "model",
    "temperature",
    "top_p",
    "stream",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "ignore_eos",
    "priority",
    "cache_salt",
    "structured_outputs",
    "chat_template_kwargs",
    "parallel_tool_calls",
)

# Chat's field name, or a prefix of it -> this request's name. The first match counts.
FIELD_NAMES: Mapping[str, str] = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "max_completion_tokens": "max_output_tokens",
    "tool_choice.function": "tool_choice",
    "tool_choice.allowed_tools": "tool_choice",
    "max_tokens": "max_output_tokens",
    "messages": "input",
}


def as_chat(request: ResponseRequest) -> ChatCompletionRequest:
    """Return the request as a chat request. Errors: ApiError, with this request's field names."""
    _check(request)
    wants_logprobs = INCLUDE_LOGPROBS in (value_or_none(request.include) or ())
    top = value_or_none(request.top_logprobs)
    if top and not wants_logprobs:
        raise invalid("top_logprobs", f"top_logprobs is only allowed together with include: [{INCLUDE_LOGPROBS!r}]")
    reasoning, text = value_or_none(request.reasoning), value_or_none(request.text)
    tools: list[Tool] = [_tool(one, f"tools[{index}]") for index, one in enumerate(value_or_none(request.tools) or ())]
    choice = None if isinstance(request.tool_choice, UnsetType) else request.tool_choice
    shared: dict[str, Any] = {name: getattr(request, name) for name in SHARED_FIELDS}
    return ChatCompletionRequest(
        messages=messages_of(request.input, value_or_none(request.instructions)),
        max_completion_tokens=request.max_output_tokens,
        logprobs=wants_logprobs,
        top_logprobs=top if wants_logprobs else None,
        response_format=UNSET if text is None else _format(value_or_none(text.format)),
        reasoning_effort=UNSET if reasoning is None else reasoning.effort,
        verbosity=UNSET if text is None else text.verbosity,
        tools=tools,
        tool_choice=_choice(choice),
        **shared,
    )


def ignored_fields(request: ResponseRequest) -> tuple[str, ...]:
    """Return the paths of fields that OpenAI's clients send and that have no effect on a chat."""
    includes = enumerate(value_or_none(request.include) or ())
    ignored = [f"include[{index}]" for index, name in includes if name in IRRELEVANT_INCLUDES]
    if (reasoning := value_or_none(request.reasoning)) is not None:
        given = (name for name in ("summary", "generate_summary") if value_or_none(getattr(reasoning, name)))
        ignored += [f"reasoning.{name}" for name in given]
    return tuple(ignored)


def response_field_name(name: str) -> str:
    """Return this request's name of a chat field."""
    for chat_name, response_name in FIELD_NAMES.items():
        if name == chat_name or name.startswith((f"{chat_name}.", f"{chat_name}[")):
            return response_name + name[len(chat_name) :]
    return name.replace("].function.", "].") if name.startswith("tools[") else name


def with_response_field_names(error: ApiError) -> ApiError:
    """Rename the fields in a chat's error, in place, to this request's names; return the error."""
    if (chat_name := error.param) is not None:
        error.param = response_field_name(chat_name)
        error.message = error.message.replace(chat_name, error.param)
        for one in ("response_format.json_schema", "response_format"):  # a second field that the message may name
            error.message = error.message.replace(one, FIELD_NAMES[one])
    return error


def _check(request: ResponseRequest) -> None:
    """Raise ApiError for fields and values that are known but not supported."""
    for index, name in enumerate(value_or_none(request.include) or ()):
        if name != INCLUDE_LOGPROBS and name not in IRRELEVANT_INCLUDES:
            allowed = ", ".join((INCLUDE_LOGPROBS, *sorted(IRRELEVANT_INCLUDES)))
            raise _unsupported(f"include[{index}]", repr(name[:80]), allowed)
    max_output_tokens = value_or_none(request.max_output_tokens)
    if max_output_tokens is not None and max_output_tokens < 1:
        raise invalid("max_output_tokens", f"max_output_tokens is {max_output_tokens}; allowed: integers from 1")
    reasoning, options = value_or_none(request.reasoning), value_or_none(request.stream_options)
    for name, default in (("context", "auto"), ("mode", "standard")):
        if reasoning is not None and value_or_none(getattr(reasoning, name)) not in (None, default):
            raise _unsupported(f"reasoning.{name}", repr(getattr(reasoning, name))[:80], f"null, {default}")
    if options is not None:
        if not value_or_none(request.stream):
            raise invalid("stream_options", "stream_options is only allowed together with stream=true")
        if value_or_none(options.include_obfuscation):
            raise _unsupported("stream_options.include_obfuscation", "true", "false")


def _tool(tool: ResponseTool, path: str) -> FunctionTool:
    if tool.type != "function":
        raise _unsupported(f"{path}.type", repr(tool.type[:80]), "function")
    return FunctionTool(
        function=FunctionDefinition(
            name=required(tool.name, f"{path}.name"),
            description=_unset_if_null(tool.description),
            parameters=_unset_if_null(tool.parameters),
            strict=_unset_if_null(tool.strict),
        )
    )


def _unset_if_null(value: Maybe[T]) -> Maybe[T]:
    """Return UNSET for null, which many clients send for absent fields: templates would show it."""
    return UNSET if value is None else value


def _choice(choice: str | ResponseToolChoice | None) -> Maybe[ToolChoice]:
    if choice is None or isinstance(choice, str):
        return choice  # type: ignore[return-value]  # the type of the field has the same literals
    if choice.type == "function":
        return NamedFunction(function=FunctionName(name=required(choice.name, "tool_choice.name")))
    if choice.type == "allowed_tools":
        mode: Literal["auto", "required"] = required(choice.mode, "tool_choice.mode")
        return AllowedTools(allowed_tools=ToolSubset(mode=mode, tools=value_or_none(choice.tools) or []))
    raise _unsupported("tool_choice.type", repr(choice.type[:80]), "function, allowed_tools")


def _format(requested: ResponseFormatConfig | None) -> Maybe[ResponseFormat]:
    if requested is None or requested.type == "text":
        return UNSET
    if requested.type == "json_object":
        return JsonObjectFormat()
    schema = JsonSchema(
        name=value_or_none(requested.name) or "schema", schema=requested.schema, strict=requested.strict
    )
    return JsonSchemaFormat(json_schema=msgspec.structs.replace(schema, description=requested.description))


def _unsupported(path: str, value: str, allowed: str) -> ApiError:
    return invalid(path, f"{path} is {value}, which is not supported yet; allowed: {allowed}", "unsupported_parameter")

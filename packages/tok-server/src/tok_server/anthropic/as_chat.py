"""Translate a /v1/messages request into a chat request, and the chat's field names back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from operator import attrgetter

from tok_client.types import (
    UNSET,
    ChatCompletionRequest,
    FunctionDefinition,
    FunctionName,
    FunctionTool,
    JSONObject,
    JsonSchema,
    JsonSchemaFormat,
    Maybe,
    NamedFunction,
    Tool,
    ToolChoice,
    UnsetType,
)
from tok_server.anthropic.conversation import chat_messages
from tok_server.anthropic.request_types import (
    CountTokensRequest,
    CustomToolInput,
    Effort,
    MessagesRequest,
    OutputFormat,
    ToolUseChoice,
)
from tok_server.openai import required, value_or_none
from tok_server.wire import ApiError, invalid, unsupported

# Fields with the same name and meaning in chats.
SAME_FIELDS = (
    "max_tokens",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "cache_salt",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "priority",
)
_get_same_fields = attrgetter(*SAME_FIELDS)

# Chat's field name, or a prefix of it -> this request's name. The first match counts.
FIELD_NAMES: Mapping[str, str] = {
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "tool_choice.function": "tool_choice",
    "stop": "stop_sequences",
}

THINKING_SWITCHES = ("enable_thinking", "thinking")  # template variables of Qwen3 and GLM, of DeepSeek and Granite
EFFORT = "reasoning_effort"  # template variable of gpt-oss


def as_chat(request: CountTokensRequest, template_variables: Set[str]) -> ChatCompletionRequest:
    """Return the request as a chat request. Errors: ApiError, with this request's field names.

    template_variables  names that the model's chat template reads
    """
    sampling = {}
    if isinstance(request, MessagesRequest):
        if request.max_tokens < 1:
            raise invalid("max_tokens", f"max_tokens is {request.max_tokens}; allowed: integers from 1")
        sampling = dict(zip(SAME_FIELDS, _get_same_fields(request), strict=True))
        sampling["stop"] = request.stop_sequences
    choice = value_or_none(request.tool_choice)
    system = None if isinstance(request.system, UnsetType) else request.system
    tools: list[Tool] = [_tool(one, f"tools[{index}]") for index, one in enumerate(value_or_none(request.tools) or ())]
    return ChatCompletionRequest(
        model=request.model,
        messages=chat_messages(request.messages, system),
        continue_final_message=_continues_answer(request),
        tools=tools,
        tool_choice=None if choice is None else _tool_choice(choice),
        parallel_tool_calls=choice is None or not value_or_none(choice.disable_parallel_tool_use),
        response_format=_response_format(request),
        reasoning_effort=_effort(request) if EFFORT in template_variables else UNSET,
        chat_template_kwargs=_template_variables(request, template_variables),
        **sampling,
    )


def settings_without_effect(
    request: CountTokensRequest, template_variables: Set[str], *, reasons: bool
) -> Iterator[str]:
    """Yield the paths of known fields that this model cannot honour.

    reasons  the model writes reasoning, whether or not its template has a switch for it
    """
    if (thinking := value_or_none(request.thinking)) is not None:
        if template_variables.isdisjoint(THINKING_SWITCHES) and reasons == (thinking.type == "disabled"):
            yield "thinking"
        if value_or_none(thinking.budget_tokens) is not None:
            yield "thinking.budget_tokens"
        if thinking.display == "omitted":
            yield "thinking.display"
    if _effort(request) is not None and EFFORT not in template_variables:
        yield "output_config.effort"


def messages_field_name(name: str) -> str:
    """Return this request's name of a chat field."""
    for chat_name, own_name in FIELD_NAMES.items():
        if name == chat_name or name.startswith((f"{chat_name}.", f"{chat_name}[")):
            return own_name + name[len(chat_name) :]
    if name.startswith("tools["):
        return name.replace("].function.", "].").replace("].parameters", "].input_schema")
    return name


def with_messages_field_names(error: ApiError) -> ApiError:
    """Rename the fields in a chat's error, in place, to this request's names; return the error."""
    if (chat_name := error.param) is not None:
        error.param = messages_field_name(chat_name)
        error.message = error.message.replace(chat_name, error.param)
    return error


def _continues_answer(request: CountTokensRequest) -> bool:
    """Return whether the answer continues the last message. Errors: ApiError for one that cannot be continued."""
    if not request.messages or (last := request.messages[-1]).role != "assistant":
        return False
    if not isinstance(last.content, str) and any(block.type != "text" for block in last.content):
        path = f"messages[{len(request.messages) - 1}].content"
        allowed = "allowed at the end of messages: a message of user, or text of assistant for the answer to continue"
        raise invalid(path, f"{path} has blocks that are not text; {allowed}")
    return True


def _tool(tool: CustomToolInput, path: str) -> FunctionTool:
    if (kind := value_or_none(tool.type)) not in (None, "custom"):
        raise unsupported(f"{path}.type", f"type {str(kind)[:80]!r} is not supported yet; allowed: custom")
    description, strict = value_or_none(tool.description), value_or_none(tool.strict)
    return FunctionTool(
        function=FunctionDefinition(
            name=required(tool.name, f"{path}.name"),
            description=UNSET if description is None else description,  # templates would show null
            parameters=required(tool.input_schema, f"{path}.input_schema"),
            strict=UNSET if strict is None else strict,
        )
    )


def _tool_choice(choice: ToolUseChoice) -> ToolChoice:
    match choice.type:
        case "any":
            return "required"
        case "tool":
            return NamedFunction(function=FunctionName(name=required(choice.name, "tool_choice.name")))
        case other:
            return other


def _response_format(request: CountTokensRequest) -> Maybe[JsonSchemaFormat]:
    config, requested = value_or_none(request.output_config), value_or_none(request.output_format)
    if config is not None and (nested := value_or_none(config.format)) is not None:
        if requested is not None:
            raise invalid("output_format", "output_format and output_config.format are both set; allowed: one of them")
        requested = nested
    return UNSET if requested is None else _json_schema(requested)


def _json_schema(requested: OutputFormat) -> JsonSchemaFormat:
    return JsonSchemaFormat(json_schema=JsonSchema(name="answer", schema=requested.schema, strict=True))


def _effort(request: CountTokensRequest) -> Effort | None:
    config = value_or_none(request.output_config)
    return None if config is None else value_or_none(config.effort)


def _template_variables(request: CountTokensRequest, template_variables: Set[str]) -> JSONObject:
    """Return the variables for the chat template: the request's own, and the template's switch for thinking."""
    thinking = value_or_none(request.thinking)
    switches = {} if thinking is None else dict.fromkeys(THINKING_SWITCHES, thinking.type != "disabled")
    found: JSONObject = {name: value for name, value in switches.items() if name in template_variables}
    return found | (value_or_none(request.chat_template_kwargs) or {})

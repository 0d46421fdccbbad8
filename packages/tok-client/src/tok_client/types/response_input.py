"""The request to `/responses`, and the conversation items of its `input`."""

from __future__ import annotations

from typing import ClassVar, Literal

from tok_client.types.base import UNSET, JSONObject, Maybe, Wire
from tok_client.types.generation import StructuredOutputs

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputTextPart(Wire, frozen=True, kw_only=True, tag_field="type", tag="input_text"):
    """Text given to the model."""

    type: ClassVar[Literal["input_text"]] = "input_text"
    text: str
    prompt_cache_breakpoint: Maybe[JSONObject] = UNSET


class InputImagePart(Wire, frozen=True, kw_only=True, tag_field="type", tag="input_image"):
    """An image given to the model."""

    type: ClassVar[Literal["input_image"]] = "input_image"
    image_url: Maybe[str] = UNSET
    file_id: Maybe[str] = UNSET
    detail: Maybe[str] = UNSET
    prompt_cache_breakpoint: Maybe[JSONObject] = UNSET


class InputFilePart(Wire, frozen=True, kw_only=True, tag_field="type", tag="input_file"):
    """A file given to the model."""

    type: ClassVar[Literal["input_file"]] = "input_file"
    file_id: Maybe[str] = UNSET
    file_data: Maybe[str] = UNSET
    file_url: Maybe[str] = UNSET
    filename: Maybe[str] = UNSET
    detail: Maybe[str] = UNSET
    prompt_cache_breakpoint: Maybe[JSONObject] = UNSET


class OutputTextPart(Wire, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """Text that the model wrote, given back to it."""

    type: ClassVar[Literal["output_text"]] = "output_text"
    text: str
    annotations: Maybe[list[JSONObject]] = UNSET
    logprobs: Maybe[list[JSONObject]] = UNSET


class OutputRefusalPart(Wire, frozen=True, kw_only=True, tag_field="type", tag="refusal"):
    """A refusal that the model gave."""

    type: ClassVar[Literal["refusal"]] = "refusal"
    refusal: str


class ReasoningTextPart(Wire, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    """Reasoning of the model."""

    type: ClassVar[Literal["reasoning_text"]] = "reasoning_text"
    text: str


class SummaryTextPart(Wire, frozen=True, kw_only=True, tag_field="type", tag="summary_text"):
    """A summary of a model's reasoning."""

    type: ClassVar[Literal["summary_text"]] = "summary_text"
    text: str


InputPart = (
    InputTextPart
    | InputImagePart
    | InputFilePart
    | OutputTextPart
    | OutputRefusalPart
    | ReasoningTextPart
    | SummaryTextPart
)


class InputItem(Wire, frozen=True, kw_only=True):
    """An item of the conversation so far. `type` gives its kind; an item without a type is a message.

    message               role, and content: text or parts of it
    function_call         call_id, name, arguments: a call that the model made
    function_call_output  call_id, output: the result of the call
    reasoning             content: the model's reasoning before the items that follow

    Items of a response's `output` are valid input items; their ids and states are ignored.
    """

    type: str = "message"
    role: Maybe[Literal["user", "assistant", "system", "developer"]] = UNSET
    content: Maybe[str | list[InputPart]] = UNSET
    call_id: Maybe[str] = UNSET
    name: Maybe[str] = UNSET
    arguments: Maybe[str] = UNSET
    output: Maybe[str | list[InputPart]] = UNSET
    summary: Maybe[list[InputPart]] = UNSET
    encrypted_content: Maybe[str] = UNSET
    id: Maybe[str] = UNSET
    status: Maybe[ItemStatus] = UNSET
    phase: Maybe[str] = UNSET
    caller: Maybe[JSONObject] = UNSET
    namespace: Maybe[str] = UNSET


class ResponseTool(Wire, frozen=True, kw_only=True):
    """A tool; the other fields apply to tools of type "function"."""

    type: str
    name: Maybe[str] = UNSET
    description: Maybe[str] = UNSET
    parameters: Maybe[JSONObject] = UNSET
    strict: Maybe[bool] = UNSET


class ResponseToolChoice(Wire, frozen=True, kw_only=True):
    """One function (type "function", `name`), or some of the tools (type "allowed_tools", `mode` and `tools`)."""

    type: str
    name: Maybe[str] = UNSET
    mode: Maybe[Literal["auto", "required"]] = UNSET
    tools: Maybe[list[JSONObject]] = UNSET


class ResponseFormatConfig(Wire, frozen=True, kw_only=True):
    """Form of the text: any ("text"), a JSON object ("json_object"), or JSON that follows `schema` ("json_schema")."""

    type: Literal["text", "json_object", "json_schema"]
    name: Maybe[str] = UNSET
    schema: Maybe[JSONObject] = UNSET
    description: Maybe[str] = UNSET
    strict: Maybe[bool] = UNSET


class ResponseText(Wire, frozen=True, kw_only=True):
    """Form and verbosity of the model's text."""

    format: Maybe[ResponseFormatConfig] = UNSET
    verbosity: Maybe[Literal["low", "medium", "high"]] = UNSET


class ResponseReasoning(Wire, frozen=True, kw_only=True):
    """Amount of reasoning, and the form of its summary."""

    effort: Maybe[Effort] = UNSET
    summary: Maybe[Literal["auto", "concise", "detailed"]] = UNSET
    generate_summary: Maybe[Literal["auto", "concise", "detailed"]] = UNSET
    context: Maybe[str] = UNSET
    mode: Maybe[str] = UNSET


class ResponseStreamOptions(Wire, frozen=True, kw_only=True):
    """Options of a stream."""

    include_obfuscation: Maybe[bool] = UNSET


class ResponseRequest(Wire, frozen=True, kw_only=True):
    """Body of `POST /responses`. Types are checked here, ranges by the server.

    `input` is a user message, or the items of the conversation so far. Fields that a stateless server does not use are
    declared loosely: their objects are not validated.

    Beyond OpenAI's reference: the last fields, from presence_penalty on, as in `ChatCompletionRequest`. At most one of
    `text.format` and `structured_outputs` constrains the text of the answer.
    """

    input: str | list[InputItem]
    model: Maybe[str] = UNSET
    instructions: Maybe[str] = UNSET
    max_output_tokens: Maybe[int] = UNSET
    temperature: Maybe[float] = UNSET
    top_p: Maybe[float] = UNSET
    text: Maybe[ResponseText] = UNSET
    reasoning: Maybe[ResponseReasoning] = UNSET
    tools: Maybe[list[ResponseTool]] = UNSET
    tool_choice: Maybe[Literal["none", "auto", "required"] | ResponseToolChoice] = UNSET
    parallel_tool_calls: Maybe[bool] = UNSET
    include: Maybe[list[str]] = UNSET
    top_logprobs: Maybe[int] = UNSET
    stream: Maybe[bool] = UNSET
    stream_options: Maybe[ResponseStreamOptions] = UNSET
    metadata: Maybe[dict[str, str]] = UNSET
    user: Maybe[str] = UNSET
    safety_identifier: Maybe[str] = UNSET
    prompt_cache_key: Maybe[str] = UNSET
    store: Maybe[bool] = UNSET
    truncation: Maybe[Literal["auto", "disabled"]] = UNSET
    service_tier: Maybe[Literal["auto", "default", "flex", "scale", "priority", "fast"]] = UNSET
    previous_response_id: Maybe[str] = UNSET
    conversation: Maybe[str | JSONObject] = UNSET
    background: Maybe[bool] = UNSET
    prompt: Maybe[JSONObject] = UNSET
    max_tool_calls: Maybe[int] = UNSET
    context_management: Maybe[list[JSONObject]] = UNSET
    moderation: Maybe[JSONObject] = UNSET
    prompt_cache_retention: Maybe[Literal["in_memory", "24h"]] = UNSET
    prompt_cache_options: Maybe[JSONObject] = UNSET
    presence_penalty: Maybe[float] = UNSET
    frequency_penalty: Maybe[float] = UNSET
    repetition_penalty: Maybe[float] = UNSET
    top_k: Maybe[int] = UNSET
    min_p: Maybe[float] = UNSET
    seed: Maybe[int] = UNSET
    stop: Maybe[str | list[str]] = UNSET
    ignore_eos: Maybe[bool] = UNSET
    priority: Maybe[int] = UNSET
    cache_salt: Maybe[str] = UNSET
    structured_outputs: Maybe[StructuredOutputs] = UNSET
    chat_template_kwargs: Maybe[JSONObject] = UNSET

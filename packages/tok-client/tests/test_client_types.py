"""Tests that wire types agree with OpenAI's reference and survive a JSON round trip."""

from __future__ import annotations

from functools import cache
from typing import get_type_hints

import msgspec
import openai.types as openai_types
import openai.types.chat as openai_chat
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as OpenAIChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as OpenAICompletionParams
from pydantic import BaseModel

from tok_client import types as wire
from tok_client.requests.params import ChatCompletionParams, CompletionParams
from tok_client.types import UNSET, known_fields

EXTENSIONS = {
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "priority",
    "stop_token_ids",
    "allowed_token_ids",
    "bad_words",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "add_special_tokens",
    "truncate_prompt_tokens",
    "return_tokens_as_token_ids",
    "return_token_ids",
    "prompt_logprobs",
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_json_object",
    "stop_when",
    "cache_salt",
}
OF_CHATS = {"chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"}

USAGE = wire.Usage(
    prompt_tokens=3,
    completion_tokens=2,
    total_tokens=5,
    prompt_tokens_details=wire.PromptTokensDetails(cached_tokens=1),
)
TOKEN = wire.ChatTokenLogprob(
    token="é",
    logprob=-0.5,
    bytes=[195, 169],
    top_logprobs=[wire.TopLogprob(token="é", logprob=-0.5, bytes=[195, 169])],
)
COMPLETION = wire.Completion(
    id="cmpl-1",
    created=1,
    model="m",
    choices=[
        wire.CompletionChoice(
            index=0,
            text="é",
            finish_reason="stop",
            logprobs=wire.CompletionLogprobs(
                tokens=["é"], token_logprobs=[-0.5], top_logprobs=[{"é": -0.5}], text_offset=[0]
            ),
            token_ids=[7],
        )
    ],
    usage=USAGE,
)
CHAT = wire.ChatCompletion(
    id="chatcmpl-1",
    created=1,
    model="m",
    choices=[
        wire.ChatChoice(
            index=0,
            message=wire.ChatMessage(content="é"),
            finish_reason="length",
            logprobs=wire.ChatLogprobs(content=[TOKEN]),
        )
    ],
    usage=USAGE,
)
CHUNK = wire.ChatCompletionChunk(
    id="chatcmpl-1",
    created=1,
    model="m",
    choices=[
        wire.ChunkChoice(
            index=0,
            delta=wire.Delta(role="assistant", content=""),
            logprobs=wire.ChatLogprobs(content=[TOKEN]),
        )
    ],
    usage=None,
)
MODEL = wire.Model(id="m", created=1, owned_by="me")

# The required members of each object in OpenAI's API reference 2.3.0.
REQUIRED: list[tuple[msgspec.Struct, str]] = [
    (COMPLETION, "id object created model choices"),
    (COMPLETION.choices[0], "finish_reason index logprobs text"),
    (wire.CompletionChoice(index=0, text=""), "finish_reason index logprobs text"),
    (CHAT, "choices created id model object"),
    (wire.ChatChoice(index=0, message=wire.ChatMessage()), "finish_reason index message logprobs"),
    (wire.ChatMessage(), "role content refusal"),
    (CHUNK, "choices created id model object"),
    (wire.ChunkChoice(index=0, delta=wire.Delta()), "delta finish_reason index"),
    (wire.ChatLogprobs(), "content refusal"),
    (wire.ChatTokenLogprob(token="", logprob=0), "token logprob bytes top_logprobs"),
    (wire.TopLogprob(token="", logprob=0), "token logprob bytes"),
    (USAGE, "prompt_tokens completion_tokens total_tokens"),
    (MODEL, "id object created owned_by"),
    (wire.ModelList(data=[]), "object data"),
    (wire.ErrorResponse(error=wire.ErrorBody(message="", type="")), "error"),
    (wire.ErrorBody(message="", type=""), "type message param code"),
]


@pytest.mark.parametrize(("made", "required"), REQUIRED)
def test_wire_objects_always_have_their_required_members(made: msgspec.Struct, required: str) -> None:
    members = msgspec.json.decode(msgspec.json.encode(made), type=dict[str, object])
    assert set(required.split()) <= set(members)


@pytest.mark.parametrize(
    ("made", "theirs"),
    [
        (COMPLETION, openai_types.Completion),
        (CHAT, openai_chat.ChatCompletion),
        (CHUNK, openai_chat.ChatCompletionChunk),
        (MODEL, openai_types.Model),
        (USAGE, openai_types.CompletionUsage),
    ],
)
def test_openai_models_accept_the_wire_objects(made: msgspec.Struct, theirs: type[BaseModel]) -> None:
    # Strict except for numbers: JSON's 0 is accepted as a float.
    model = theirs.model_validate_json(msgspec.json.encode(made), strict=True)
    assert msgspec.json.decode(model.model_dump_json(exclude_unset=True)) == msgspec.to_builtins(made)


@pytest.mark.parametrize(
    ("ours", "theirs", "more"),
    [
        (wire.CompletionRequest, OpenAICompletionParams, set()),
        (wire.ChatCompletionRequest, OpenAIChatParams, OF_CHATS),
    ],
)
def test_requests_have_the_openai_fields_and_the_extensions(
    ours: type[msgspec.Struct], theirs: type, more: set[str]
) -> None:
    assert known_fields(ours) == frozenset(get_type_hints(theirs)) | EXTENSIONS | more | {"stream"}


@pytest.mark.parametrize(
    ("params", "request_type"),
    [(CompletionParams, wire.CompletionRequest), (ChatCompletionParams, wire.ChatCompletionRequest)],
)
def test_create_takes_every_field_of_the_request(params: type, request_type: type[msgspec.Struct]) -> None:
    assert frozenset(get_type_hints(params)) | {"stream"} == known_fields(request_type)


def test_known_fields_include_the_tag_of_a_message() -> None:
    assert known_fields(wire.ToolMessage) == {"role", "content", "tool_call_id"}


def test_request_fields_distinguish_absent_null_and_zero() -> None:
    decode = msgspec.json.Decoder(wire.CompletionRequest).decode
    absent, null, zero = (decode(b'{"prompt":"a"%s}' % more) for more in (b"", b',"logprobs":null', b',"logprobs":0'))
    assert (absent.logprobs, null.logprobs, zero.logprobs) == (UNSET, None, 0)
    assert [msgspec.json.encode(request) for request in (absent, null, zero)] == [
        b'{"prompt":"a"}',
        b'{"prompt":"a","logprobs":null}',
        b'{"prompt":"a","logprobs":0}',
    ]


def test_responses_omit_extensions_that_were_not_requested() -> None:
    members = msgspec.to_builtins(wire.CompletionChoice(index=0, text=""))
    assert "token_ids" not in members
    assert "usage" not in msgspec.to_builtins(msgspec.structs.replace(CHUNK, usage=UNSET))
    assert msgspec.to_builtins(CHUNK)["usage"] is None


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        (b'"a"', ["a"]),
        (b'""', [""]),
        (b'["a","b"]', ["a", "b"]),
        (b"[1,2]", [[1, 2]]),
        (b"[[1,2],[3]]", [[1, 2], [3]]),
        (b"[[]]", [[]]),
    ],
)
def test_every_form_of_prompt_is_a_list_of_prompts(prompt: bytes, prompts: list[object]) -> None:
    request = msgspec.json.decode(b'{"prompt":%s}' % prompt, type=wire.CompletionRequest)
    assert request.prompts() == prompts


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{}", "prompt"),
        (b'{"prompt":null}', r"\$\.prompt"),
        (b'{"prompt":[]}', r"prompt is \[\]"),
        (b'{"prompt":["a",1]}', "prompt mixes int, str"),
        (b'{"prompt":[[1],"a"]}', "prompt mixes list, str"),
        (b'{"prompt":[1.5]}', r"\$\.prompt\[0\]"),
        (b'{"prompt":[true]}', r"\$\.prompt\[0\]"),
        (b'{"prompt":"a","n":"2"}', r"\$\.n"),
        (b'{"prompt":"a","n":true}', r"\$\.n"),
        (b'{"prompt":"a","max_tokens":1.5}', r"\$\.max_tokens"),
        (b'{"prompt":"a","temperature":"1"}', r"\$\.temperature"),
        (b'{"prompt":"a","stop":[1]}', r"\$\.stop\[0\]"),
        (b'{"prompt":"a","stream":1}', r"\$\.stream"),
        (b'{"prompt":"a","stream_options":{"include_usage":1}}', r"\$\.stream_options\.include_usage"),
        (b'{"prompt":"a","logit_bias":{"1":null}}', r"\$\.logit_bias"),
        (b'{"prompt":"a","logprobs":true}', r"\$\.logprobs"),
        (b"[]", "Expected `object`"),
    ],
)
def test_a_completion_request_of_wrong_types_names_the_field(body: bytes, message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.json.decode(body, type=wire.CompletionRequest)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{}", "messages"),
        (b'{"messages":[]}', r"messages is \[\]"),
        (b'{"messages":"hi"}', r"\$\.messages"),
        (b'{"messages":[{"role":"king","content":""}]}', r"'king' - at `\$\.messages\[0\]\.role"),
        (b'{"messages":[{"content":""}]}', r"role` - at `\$\.messages\[0\]"),
        (b'{"messages":[{"role":"user"}]}', r"content` - at `\$\.messages\[0\]"),
        (b'{"messages":[{"role":"user","content":null}]}', r"\$\.messages\[0\]\.content"),
        (b'{"messages":[{"role":"tool","content":""}]}', r"tool_call_id` - at `\$\.messages\[0\]"),
        (
            b'{"messages":[{"role":"system","content":[{"type":"image_url","image_url":{}}]}]}',
            r"'image_url' - at `\$\.messages\[0\]\.content\[0\]\.type",
        ),
        (b'{"messages":[{"role":"user","content":""}],"logprobs":1}', r"\$\.logprobs"),
        (b'{"messages":[{"role":"user","content":""}],"service_tier":"x"}', r"\$\.service_tier"),
    ],
)
def test_a_chat_request_of_wrong_types_names_the_field(body: bytes, message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.json.decode(body, type=wire.ChatCompletionRequest)


def test_chat_messages_of_every_role_are_decoded() -> None:
    body = b"""{"messages":[
        {"role":"system","content":"s"}, {"role":"developer","content":[{"type":"text","text":"d"}]},
        {"role":"user","content":[{"type":"text","text":"u"},{"type":"image_url","image_url":{"url":"x"}}]},
        {"role":"assistant","content":null,"tool_calls":[
            {"id":"1","type":"function","function":{"name":"f","arguments":"{}"}}]},
        {"role":"tool","content":"t","tool_call_id":"1"}, {"role":"function","content":null,"name":"f"},
        {"role":"assistant"}]}"""
    request = msgspec.json.decode(body, type=wire.ChatCompletionRequest)
    roles = [message.role for message in request.messages]
    assert roles == ["system", "developer", "user", "assistant", "tool", "function", "assistant"]
    assert msgspec.json.decode(msgspec.json.encode(request)) == msgspec.json.decode(body)


@pytest.mark.parametrize("kind", [wire.CompletionRequest, wire.ChatCompletionRequest])
def test_unknown_request_fields_are_ignored(kind: type[msgspec.Struct]) -> None:
    body = b'{"prompt":"a","messages":[{"role":"user","content":"a","x":1}],"x":1}'
    msgspec.json.decode(body, type=kind)
    assert "x" not in known_fields(kind)


@pytest.mark.parametrize("made", [COMPLETION, CHAT, CHUNK, MODEL])
def test_responses_of_lenient_servers_are_decoded(made: msgspec.Struct) -> None:
    lenient = msgspec.to_builtins(made) | {
        "system_fingerprint": None,
        "kv_transfer_params": None,
        "usage": None,
    }
    for choice in lenient.get("choices", []):
        choice |= {"logprobs": None, "finish_reason": "abort", "stop_reason": 3, "token_ids": None}
    read = msgspec.convert(lenient, type(made))
    assert getattr(read, "usage", None) is None


FINITE = st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


@pytest.mark.parametrize(
    "kind", [wire.CompletionRequest, wire.Completion, wire.ChatCompletion, wire.ChatCompletionChunk]
)
@given(data=st.data())
def test_wire_objects_survive_a_json_round_trip(kind: type[msgspec.Struct], data: st.DataObject) -> None:
    made = data.draw(struct(kind))
    assert msgspec.json.decode(msgspec.json.encode(made), type=kind) == made


@cache
def struct(kind: type[msgspec.Struct]) -> st.SearchStrategy[msgspec.Struct]:
    """Return a strategy for any instance of `kind`, with each field drawn from its type."""
    fields = {field.name: of_type(field.name, field.type) for field in msgspec.structs.fields(kind)}
    return st.builds(kind, **fields)


def of_type(name: str, hint: object) -> st.SearchStrategy[object]:
    if name == "prompt":
        ids = st.lists(st.integers(0, 2**31), min_size=1, max_size=3)
        return TEXT | st.lists(TEXT, min_size=1, max_size=3) | ids | st.lists(ids, min_size=1, max_size=3)
    return of_info(msgspec.inspect.type_info(hint))


def of_info(info: msgspec.inspect.Type) -> st.SearchStrategy[object]:
    match info:
        case msgspec.inspect.UnionType(types=members):
            return st.one_of(*(of_info(member) for member in members))
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.IntType():
            return st.integers(-(2**63), 2**63 - 1)
        case msgspec.inspect.FloatType():
            return FINITE
        case msgspec.inspect.StrType():
            return TEXT
        case msgspec.inspect.ListType(item_type=item):
            return st.lists(of_info(item), max_size=2)
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(of_info(key), of_info(value), max_size=2)
        case msgspec.inspect.CustomType(cls=cls) if cls is object:
            return st.none() | TEXT | st.integers(-9, 9)
        case msgspec.inspect.StructType(cls=cls):
            return struct(cls)
        case _:
            raise NotImplementedError(info)

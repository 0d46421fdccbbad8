"""Every request field is honoured, refused by name, or harmless; none is dropped silently."""

from __future__ import annotations

import pytest

from support.serving import Server
from tok_client.types import ChatCompletionRequest, CompletionRequest, known_fields
from tok_server.openai.generation.other_servers import REFUSED_PATHS, UnsupportedFields
from tok_server.openai.generation.request_fields import ACCEPTED_FIELDS, CHAT, COMPLETION, WITHOUT_EFFECT


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Fields whose effect other tests show.
BOTH = words(
    "model max_tokens temperature top_p n stream stream_options stop presence_penalty frequency_penalty logit_bias "
    "seed top_k min_p repetition_penalty min_tokens ignore_eos priority stop_token_ids return_token_ids logprobs "
    "prompt_logprobs response_format structured_outputs guided_json guided_regex guided_choice guided_grammar "
    "guided_json_object stop_when cache_salt allowed_token_ids bad_words include_stop_str_in_output "
    "skip_special_tokens add_special_tokens truncate_prompt_tokens return_tokens_as_token_ids"
)
HONOURED = {
    CompletionRequest: BOTH | {"prompt", "echo", "best_of"},
    ChatCompletionRequest: BOTH
    | words(
        "messages top_logprobs max_completion_tokens tools tool_choice parallel_tool_calls reasoning_effort verbosity "
        "chat_template_kwargs add_generation_prompt continue_final_message chat_template"
    ),
}
TABLES: dict[type, tuple[UnsupportedFields, ...]] = {CompletionRequest: COMPLETION, ChatCompletionRequest: CHAT}
STRANGE = {"no": ["value", "asks", "for", "this"]}


@pytest.mark.parametrize("kind", [CompletionRequest, ChatCompletionRequest])
def test_every_field_is_honoured_or_refused_or_harmless(kind: type[CompletionRequest | ChatCompletionRequest]) -> None:
    refused = {name for table in TABLES[kind] for name in table.fields}
    harmless = ACCEPTED_FIELDS | WITHOUT_EFFECT.keys()
    assert known_fields(kind) <= HONOURED[kind] | refused | harmless
    assert not HONOURED[kind] & (refused | harmless)
    assert not refused & harmless
    assert HONOURED[kind] <= known_fields(kind)


@pytest.mark.parametrize("kind", [CompletionRequest, ChatCompletionRequest])
def test_unsupported_field_gets_400_by_name_unless_its_value_is_neutral(
    server: Server, kind: type[CompletionRequest | ChatCompletionRequest]
) -> None:
    chat = kind is ChatCompletionRequest
    ask = server.chat if chat else server.complete
    needed = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "one"}
    neutral: dict[str, object] = {}
    for table in TABLES[kind]:
        for name, values in table.fields.items():
            answer = ask(**needed, **{name: STRANGE})
            assert answer.status == 400, name
            error = answer.error()
            assert (error["param"], error["code"]) == (name, "unsupported_parameter")
            assert name in str(error["message"])
            neutral[name] = values[-1]
    answer = ask(**needed, max_tokens=1, **neutral)
    assert answer.status == 200, answer.body
    assert "x-tok-ignored" not in answer.headers


ASKS_FOR_MORE = {
    "store": True,
    "service_tier": "flex",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "explicit"},
    "max_tool_calls": 3,
}


def test_fields_without_effect_are_accepted_and_listed_as_ignored(server: Server) -> None:
    assert ASKS_FOR_MORE.keys() == WITHOUT_EFFECT.keys()
    chat: dict[str, object] = {"messages": [{"role": "user", "content": "hi"}]}
    for ask, needed in ((server.chat, chat), (server.complete, {"prompt": "one"})):
        answer = ask(**needed, max_tokens=1, zeta=1, **ASKS_FOR_MORE)
        assert answer.status == 200, answer.body
        assert answer.headers["x-tok-ignored"] == ",".join([*WITHOUT_EFFECT, "zeta"])
        for name, values in WITHOUT_EFFECT.items():
            for value in values:
                answer = ask(**needed, max_tokens=1, **{name: value})
                assert answer.status == 200, answer.body
                assert "x-tok-ignored" not in answer.headers


def test_effort_and_verbosity_that_templates_lack_are_listed_as_ignored(server: Server) -> None:
    messages = [{"role": "user", "content": "hi"}]
    answer = server.chat(messages=messages, max_tokens=1, reasoning_effort="high", verbosity="low")
    assert answer.status == 200, answer.body
    assert answer.headers["x-tok-ignored"] == "reasoning_effort,verbosity"
    answer = server.chat(messages=messages, max_tokens=1, reasoning_effort="none", verbosity="medium")
    assert "x-tok-ignored" not in answer.headers
    assert server.chat(messages=messages, max_tokens=1, verbosity="loud").error()["param"] == "verbosity"


@pytest.mark.parametrize("path", REFUSED_PATHS)
def test_unsupported_nested_field_gets_400_by_name_unless_it_is_null(server: Server, path: str) -> None:
    field, name = path.split(".")
    answer = server.complete(prompt="one", max_tokens=2, **{field: {"regex": "a", name: {"type": "x"}}})
    assert answer.status == 400
    assert answer.error()["param"] == path
    answer = server.complete(prompt="one", max_tokens=2, **{field: {"regex": "a", name: None}})
    assert answer.status == 200


@pytest.mark.parametrize(
    ("field", "value", "instead"),
    [
        ("use_beam_search", True, "best_of"),
        ("regex", "[a-z]+", "structured_outputs.regex"),
        ("ebnf", 'root ::= "a"', "structured_outputs.grammar"),
        ("grammar", 'root ::= "a"', "structured_outputs.grammar"),
        ("json_schema", "{}", "structured_outputs.json"),
        ("logprob_token_ids", [1], "allowed_token_ids"),
        ("thinking_token_budget", 5, "max_"),
        ("max_new_tokens", 5, "max_"),
        ("lora_path", "a", "adapters"),
    ],
)
def test_refused_field_of_another_server_names_what_to_use_instead(
    server: Server, field: str, value: object, instead: str
) -> None:
    for answer in (
        server.complete(prompt="one", **{field: value}),
        server.chat(messages=[{"role": "user", "content": "hi"}], **{field: value}),
        server.call("POST", "/v1/responses", {"input": "hi", field: value}),
    ):
        assert answer.status == 400
        assert answer.error()["param"] == field
        assert instead in str(answer.error()["message"])

"""The grammar of tool calls accepts exactly the texts that a model with tools may write."""

from __future__ import annotations

from typing import Any

import pytest
import xgrammar

from tok_client.types import ChatCompletionRequest, FunctionTool
from tok_core.grammar.text import rules_of
from tok_core.sampling_params import Grammar
from tok_server.openai.chat.tools import AllowedToolCalls, allowed_tool_calls, answer_format
from tok_server.parsing.message_reader import NO_MARKUP, CallFormat, Markup, MessageReader, build_message
from tok_server.wire.errors import ApiError
from tok_server.wire.json import decode, encode

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
END = 256


def function(name: str, **more: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, **more}}


def offered(**fields: object) -> AllowedToolCalls:
    tools = [function("weather", parameters=CITY), function("time")]
    body = encode({"messages": [{"role": "user", "content": "hi"}], "tools": tools, **fields})
    return allowed_tool_calls(decode(body, ChatCompletionRequest))


def matches(found: AllowedToolCalls, markup: Markup, text: str, asked: Grammar | None = None) -> bool:
    grammar = answer_format(found, markup, asked).grammar
    assert grammar is not None
    pieces = [bytes([byte]) for byte in range(256)] + [b""]
    info = xgrammar.TokenizerInfo(pieces, xgrammar.VocabType.RAW, stop_token_ids=[END])
    matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(info).compile_grammar(rules_of(grammar)))
    return all(matcher.accept_token(byte) for byte in text.encode()) and matcher.accept_token(END)


def call(name: str, arguments: str, kind: CallFormat = "hermes") -> str:
    if kind == "llama3":
        return f'{{"name": "{name}", "parameters": {arguments}}}'
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


PARIS = '{"city": "Paris"}'


@pytest.mark.parametrize("kind", ["hermes", "llama3"])
def test_tool_choice_required_allows_only_tool_calls(kind: CallFormat) -> None:
    markup = Markup(calls=kind, tools=frozenset({"weather", "time"}))
    found = offered(tool_choice="required")
    between = "\n" if kind == "hermes" else "; "
    one, other = call("weather", PARIS, kind), call("time", "{}", kind)
    for text in (one, other, one + between + other):
        assert matches(found, markup, text)
        reader = MessageReader(markup)
        read = build_message(reader.feed(text) + reader.finish())
        assert read.content is None
        assert reader.calls == text.count("name")
    for text in ("", "hello", one + one, call("weather", "{}", kind), call("time", PARIS, kind), one + " "):
        assert not matches(found, markup, text)
    alone = offered(tool_choice="required", parallel_tool_calls=False)
    assert matches(alone, markup, one)
    assert not matches(alone, markup, one + between + other)


def test_named_tool_choice_allows_only_calls_of_that_tool() -> None:
    markup = Markup(calls="hermes")
    one = call("time", "{}")
    choices: list[tuple[dict[str, Any], bool]] = [
        ({"type": "function", "function": {"name": "time"}}, False),  # a named function is called exactly once
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [function("time")]}}, True),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"name": "time"}]}}, True),
    ]
    for choice, several in choices:
        found = offered(tool_choice=choice)
        assert matches(found, markup, one)
        assert matches(found, markup, f"{one}\n{one}") is several
        assert not matches(found, markup, call("weather", PARIS))


@pytest.mark.parametrize("thinking", [True, False])
def test_required_tool_call_may_follow_reasoning(thinking: bool) -> None:
    markup = Markup(calls="hermes", reasoning=True, thinking=thinking)
    found = offered(tool_choice="required")
    one = call("time", "{}")
    begun = "" if thinking else "<think>"
    for thoughts in ("", "\nhm: </thin> <<//think </<tool_call>", "é</t</th"):
        assert matches(found, markup, f"{begun}{thoughts}</think>\n\n{one}")
    assert matches(found, markup, one) is not thinking
    assert not matches(found, markup, f"{begun}a</think>b</think>\n\n{one}")


@pytest.mark.parametrize("kind", ["hermes", "llama3"])
def test_strict_tool_calls_match_their_schema_but_text_is_allowed(kind: CallFormat) -> None:
    markup = Markup(calls=kind)
    found = offered(tools=[function("weather", parameters=CITY, strict=True)])
    good, bad = call("weather", PARIS, kind), call("weather", '{"town": "Paris"}', kind)
    for text in ("", "It is 5 < 6.", "Well {}.\nSo", "1 <", good):
        assert matches(found, markup, text), text
    for text in (bad, f"\n{bad}", good + "x", f"{good}\n{bad}"):
        assert not matches(found, markup, text), text
    assert matches(found, markup, f"Let me see.\n{good}") is (kind == "hermes")


def test_tools_need_no_grammar_unless_strict_or_required() -> None:
    for fields in ({}, {"tool_choice": "auto"}, {"tool_choice": "none"}):
        assert answer_format(offered(**fields), Markup(calls="hermes")).grammar is None
    assert answer_format(offered(tool_choice="required"), Markup(calls=None)).grammar is None


JSON = Grammar(kind="json_schema", value='{"type": "integer"}')


def test_response_format_is_allowed_beside_calls_and_after_reasoning() -> None:
    markup = Markup(calls="hermes", reasoning=True)
    found = offered()
    for thoughts in ("", "<think>hm</think>\n\n"):
        for said in ("12", call("weather", PARIS)):
            assert matches(found, markup, thoughts + said, JSON)
        for said in ("", "hello", call("weather", "{}"), call("weather", PARIS) + "12"):
            assert not matches(found, markup, thoughts + said, JSON)
    bare = offered(tools=None)
    assert matches(bare, Markup(reasoning=True, thinking=True), "hm</think>\n\n12", JSON)
    assert answer_format(bare, NO_MARKUP, JSON).grammar is JSON


def test_response_format_does_not_apply_to_a_required_tool_call() -> None:
    markup = Markup(calls="hermes", reasoning=True)
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        found = offered(tool_choice=choice)
        for thoughts in ("", "<think>hm</think>\n\n"):
            assert matches(found, markup, thoughts + call("weather", PARIS), JSON)
            for said in ("12", call("weather", "12"), "12" + call("weather", PARIS)):
                assert not matches(found, markup, thoughts + said, JSON)
        with pytest.raises(ApiError) as refused:
            answer_format(found, markup, Grammar(kind="ebnf", value='root ::= "yes"'))
        assert (refused.value.status, refused.value.param) == (400, "response_format")


def test_ebnf_grammar_covers_the_whole_answer_and_excludes_tools() -> None:
    rules = Grammar(kind="ebnf", value='root ::= "yes"')
    assert answer_format(offered(tools=None), Markup(reasoning=True), rules) == (rules, NO_MARKUP)
    with pytest.raises(ApiError) as refused:
        answer_format(offered(), Markup(calls="hermes"), rules, "guided_grammar")
    assert refused.value.param == "guided_grammar"
    pattern = Grammar(kind="regex", value="(")
    with pytest.raises(ApiError) as refused:
        answer_format(offered(), Markup(calls="hermes"), pattern, "guided_regex")
    assert refused.value.param == "guided_regex"


def test_unsupported_tool_schema_is_refused_naming_the_tool() -> None:
    tools = [function("time"), function("odd", parameters={"type": "object", "propertyNames": {"maxLength": 3}})]
    with pytest.raises(ApiError) as refused:
        answer_format(offered(tools=tools, tool_choice="required"), Markup(calls="hermes"))
    assert refused.value.param == "tools[1].function.parameters"
    named = {"type": "function", "function": {"name": "odd"}}
    with pytest.raises(ApiError) as refused:
        answer_format(offered(tools=tools, tool_choice=named), Markup(calls="hermes"))
    assert refused.value.param == "tools[1].function.parameters"


@pytest.mark.parametrize(
    ("parameters", "good", "bad"),
    [
        ({"type": ["object", "null"], "maxProperties": 0}, "{}", "null"),
        ({"$defs": {"a": {"enum": ["b", {}]}}, "$ref": "#/$defs/a"}, "{}", '"b"'),
    ],
)
def test_arguments_of_a_required_call_are_an_object(parameters: dict[str, object], good: str, bad: str) -> None:
    found = offered(tools=[function("f", parameters=parameters)], tool_choice="required")
    assert matches(found, Markup(calls="hermes"), call("f", good))
    assert not matches(found, Markup(calls="hermes"), call("f", bad))


@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        ({"type": "string"}, 'the type "object"'),
        ({"$defs": {"a": {"type": "string"}}, "$ref": "#/$defs/a"}, "something is valid"),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "a value that ends"),
    ],
)
def test_tool_schema_without_a_finite_object_is_refused(parameters: dict[str, object], why: str) -> None:
    tools = [function("time"), function("odd", parameters=parameters)]
    with pytest.raises(ApiError, match=why) as refused:
        answer_format(offered(tools=tools, tool_choice="required"), Markup(calls="hermes"))
    assert refused.value.param == "tools[1].function.parameters"


def test_endless_response_format_beside_tools_is_refused_by_its_field() -> None:
    endless = Grammar(kind="json_schema", value='{"items": {"$ref": "#"}, "minItems": 1}')
    with pytest.raises(ApiError, match="a value that ends") as refused:
        answer_format(offered(), Markup(calls="hermes"), endless, "guided_json")
    assert refused.value.param == "guided_json"


def test_grammar_of_calls_that_is_too_long_is_refused_naming_the_tools() -> None:
    sets = {
        f"p{i}": {"type": "array", "uniqueItems": True, "items": {"enum": list(range(i, i + 8))}} for i in range(20)
    }
    tools = [function("f", parameters={"type": "object", "properties": sets})]
    with pytest.raises(ApiError, match=r"^tools cannot be enforced: grammar has \d+ characters") as refused:
        answer_format(offered(tools=tools, tool_choice="required"), Markup(calls="hermes"))
    assert (refused.value.status, refused.value.param) == (400, "tools")


def test_tool_schemas_that_are_too_large_are_refused_naming_the_tools() -> None:
    kinds = [{"properties": {"kind": {"const": f"{i}"}}, "required": ["kind"]} for i in range(980)]
    long = {"type": "object", "properties": {"a": {"const": "x" * 70_000}}}
    patterns = {f"p{i}": {"type": "string", "pattern": f"{'ab[cd]e?' * 50}{i}"} for i in range(400)}
    for parameters, path in (
        ([{"type": "object", "oneOf": kinds}], "tools[0].function.parameters"),
        ([{"type": "object", "oneOf": kinds[:100]}] * 9, "tools[1].function.parameters"),
        ([{"type": "object", "properties": patterns}], "tools[0].function.parameters"),
        ([long] * 4, "tools"),
    ):
        tools = [function(f"f{index}", parameters=one) for index, one in enumerate(parameters)]
        assert answer_format(offered(tools=tools), Markup(calls="hermes")).grammar is None
        with pytest.raises(ApiError) as refused:
            answer_format(offered(tools=tools, tool_choice="required"), Markup(calls="hermes"))
        assert (refused.value.status, refused.value.param) == (400, path)


REFUSED: list[tuple[dict[str, object], str]] = [
    ({"tools": [{"type": "custom", "custom": {"name": "c"}}]}, "tools[0].type"),
    ({"tools": [function("a b")]}, "tools[0].function.name"),
    ({"tools": [function("")]}, "tools[0].function.name"),
    ({"tools": [function("f"), function("f")]}, "tools[1].function.name"),
    ({"tools": [function(f"f{number}") for number in range(1025)]}, "tools"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name"),
    ({"tool_choice": {"type": "custom", "custom": {"name": "g"}}}, "tool_choice.type"),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
     "tool_choice.allowed_tools.tools"),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{}]}}},
     "tool_choice.allowed_tools.tools[0]"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:50])
def test_invalid_tools_or_tool_choice_is_refused_naming_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        offered(**fields)
    assert refused.value.param == param
    assert param.partition(".")[0].partition("[")[0] in refused.value.message


def test_tools_reach_the_template_unchanged() -> None:
    tools = [function("weather", parameters=CITY, description="d"), function("time")]
    found = offered(tools=tools)
    assert found.template_tools == tools
    assert all(decode(encode(tool), FunctionTool) for tool in found.template_tools)

"""Parsers of tool calls and reasoning give the same pieces for any chunking and lose no other text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from support.fuzzing import fuzzed
from tok_client.types import FunctionToolCall
from tok_server.parsing.call_object import CallObject
from tok_server.parsing.json_scan import JsonScanner
from tok_server.parsing.message_reader import CallFormat, Markup, MessageReader, build_message, call_parser
from tok_server.parsing.pieces import ArgumentsPiece, CallBegin, ContentPiece, Piece, ReasoningPiece, merge_pieces
from tok_server.parsing.reasoning import ReasoningReader

TOOLS = frozenset({"f", "get_weather"})
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=4), JSON, max_size=3)
# Fragments of calls, whole and broken, so that generated texts reach every error path.
SCRAPS = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "<tool", "_call>", "<|python_tag|>", "<|python", "<think>", "</think>", "</thi",
        '{"name": "f", "arguments": {"a": 1}}', '{"name": "f", "parameters": {"é": [1, {}]}}', '{"name": "f"}',
        '{"arguments": {"a": "}"}, "name": "get_weather"}', '{"name": "unknown", "arguments": {}}', '{"name": "f", ',
        '"arguments": {', '"arguments": "{}"}', "{", "}", "[", '"', "\n", " ", ";", "hello", "{}", '{"x": 1}', "\\u00e9"
    ]
)  # fmt: skip
ANSWERS = st.lists(SCRAPS | st.text(max_size=3), max_size=12).map("".join)


def cut(text: str, places: Sequence[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(ends)]


def read(parts: Sequence[str], markup: Markup) -> list[Piece]:
    reader = MessageReader(markup)
    pieces = [piece for part in parts for piece in reader.feed(part)]
    return merge_pieces(pieces + reader.finish())


def calls(text: str, kind: CallFormat) -> list[Piece]:
    parser = call_parser(kind, TOOLS)
    return merge_pieces(parser.feed(text) + parser.finish())


@pytest.mark.parametrize("kind", ["hermes", "llama3", None])
@pytest.mark.parametrize("thinking", [True, False])
@given(text=ANSWERS, places=st.lists(st.integers(0, 1000), max_size=20))
def test_message_reader_gives_the_same_pieces_for_any_chunking(
    kind: CallFormat | None, thinking: bool, text: str, places: list[int]
) -> None:
    for reasoning in (True, False):
        markup = Markup(calls=kind, tools=TOOLS, reasoning=reasoning, thinking=thinking)
        whole = read([text], markup)
        assert read(cut(text, places), markup) == whole
        assert read(list(text), markup) == whole
        build_message(whole)


@pytest.mark.parametrize("kind", ["hermes", "llama3"])
@given(text=ANSWERS)
def test_answer_without_a_tool_call_is_all_content(kind: CallFormat, text: str) -> None:
    found = calls(text, kind)
    if not any(isinstance(piece, CallBegin) for piece in found):
        assert "".join(piece.text for piece in found if isinstance(piece, ContentPiece)) == text


@given(before=st.sampled_from(["", "Let me see.", "a < b <tool"]), arguments=st.lists(OBJECTS, min_size=1, max_size=3))
def test_hermes_parser_reads_calls_and_the_text_before_them(before: str, arguments: list[dict[str, object]]) -> None:
    written = "\n".join(
        f"<tool_call>\n{json.dumps({'name': 'f', 'arguments': one})}\n</tool_call>" for one in arguments
    )
    check(calls(before + "\n" + written, "hermes"), before, arguments)


@given(before=st.sampled_from(["", "Let me see.\n"]), arguments=st.lists(OBJECTS, min_size=1, max_size=3))
def test_llama3_parser_reads_calls_and_the_text_before_them(before: str, arguments: list[dict[str, object]]) -> None:
    written = "; ".join(json.dumps({"name": "f", "parameters": one}) for one in arguments)
    for tag in ("", "<|python_tag|>"):
        check(calls(before + tag + written, "llama3"), before.strip(), arguments)


def check(pieces: list[Piece], content: str, arguments: list[dict[str, object]]) -> None:
    found = build_message(pieces)
    assert (found.content or "") == content
    assert isinstance(found.tool_calls, list)
    assert [json.loads(call.function.arguments) for call in found.tool_calls] == arguments  # type: ignore[union-attr]
    assert len({call.id for call in found.tool_calls}) == len(arguments)


def test_parser_emits_a_call_once_complete_and_content_at_once() -> None:
    parser = call_parser("hermes", TOOLS)
    assert parser.feed('so <tool_call>{"name": "f"') == [ContentPiece("so")]
    assert parser.feed(', "arguments": {"city": "Paris"}') == []
    assert parser.feed("}") == [CallBegin("f"), ArgumentsPiece('{"city": "Paris"}')]
    assert parser.feed("</tool_call>\n") == []
    assert parser.feed('<tool_call>{"name": "f", "arguments": {"city": Paris') != []
    assert parser.finish() == []


BROKEN = [
    '{"a": True}', '{"a": 1,}', "{'a': 1}", '{"a": 1', '"plain"', '"[1]"', '"{\\"a\\": True}"', '"{\\"a\\": NaN}"',
    '{"a": NaN}', '{"a": 01}', '{"a" 1}', '{"a": 1}, "arguments": {}', '{"a": 1}, "more": 1', '{"a": "x', "1", "true",
    "[1]", '{"a": ' + "9" * 5000 + "}", '{"a":' * 20_000 + "1" + "}" * 20_000, '"{\\ud800}"', '"{} {}"',
]  # fmt: skip


@pytest.mark.parametrize("arguments", BROKEN, ids=[one[:20] for one in BROKEN])
@pytest.mark.parametrize("kind", ["hermes", "llama3"])
def test_a_call_whose_arguments_are_no_object_is_content(kind: CallFormat, arguments: str) -> None:
    opening, closing = ("<tool_call>", "</tool_call>") if kind == "hermes" else ("", "")
    for text in (
        f'{opening}{{"name": "f", "arguments": {arguments}}}{closing}\n so',
        f'{opening}{{"arguments": {arguments}, "name": "f"}}{closing}',
    ):
        assert calls(text, kind) == [ContentPiece(text)]
        assert read(list(text), Markup(calls=kind, tools=TOOLS)) == [ContentPiece(text)]


WRITTEN = st.lists(
    SCRAPS
    | st.sampled_from(BROKEN[:-5])
    | st.sampled_from(['<tool_call>{"name": "f", "arguments": ', '{"name": "f", "parameters": '])
    | st.sampled_from(["}</tool_call>", "};", ", "]),
    max_size=10,
).map("".join)


@pytest.mark.parametrize("kind", ["hermes", "llama3"])
@fuzzed(150)
@given(text=WRITTEN | ANSWERS)
def test_calls_have_object_arguments_and_all_other_text_is_content(kind: CallFormat, text: str) -> None:
    found = build_message(calls(text, kind))
    made = found.tool_calls if isinstance(found.tool_calls, list) else []
    for call in made:
        assert isinstance(call, FunctionToolCall)
        assert call.function.name in TOOLS
        assert isinstance(json.loads(call.function.arguments, parse_constant=pytest.fail), dict)
    if not made:
        assert (found.content or "") == text
    # Only markers, white space and calls leave the text: every other character is content, in order.
    rest = iter(text)
    assert all(character in rest for character in found.content or "")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', "hermes"),
        ("<tool_call>not json</tool_call>", "hermes"),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "hermes"),
        ('<tool_call>{"name": 1, "arguments": {}}</tool_call>', "hermes"),
        ('<tool_call>"f"</tool_call>', "hermes"),
        ('<tool_call>{"arguments": {}}</tool_call>', "hermes"),
        ('<tool_call>{"name": "f"', "hermes"),
        ('<tool_call>{"name": "f", "arguments": {"a": tru', "hermes"),
        ('<tool_call>{"name": "f", "arguments": "\\ud800"}', "hermes"),
        ('{"name": "Alice", "parameters": {}}', "llama3"),
        ('{"name": "f", "age": 3}', "llama3"),
        ('The object {"name": "f", "parameters": {}} is no call.', "llama3"),
        ('<|python_tag|>print("f")', "llama3"),
    ],
)
def test_invalid_tool_calls_are_content(text: str, kind: CallFormat) -> None:
    assert calls(text, kind) == [ContentPiece(text)]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ('<tool_call>{"name": "f"}</tool_call>', [CallBegin("f"), ArgumentsPiece("{}")]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', [CallBegin("f"), ArgumentsPiece("{}")]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', [CallBegin("f"), ArgumentsPiece('{"a": 1}')]),
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}', [CallBegin("f"), ArgumentsPiece('{"a": 1}')]),
        ('<tool_call>{"id": 7, "name": "f", "parameters": {}}', [CallBegin("f"), ArgumentsPiece("{}")]),
        ('<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}', [CallBegin("f"), ArgumentsPiece('{"a": "x\\ny"}')]),
        (
            '<tool_call>{"name": "f", "arguments": {}}}</tool_call>',
            [CallBegin("f"), ArgumentsPiece("{}"), ContentPiece("}")],
        ),
        (
            '<tool_call>{"name": "f", "arguments": {}} and <tool_call>{"name": "f"}',
            [CallBegin("f"), ArgumentsPiece("{}"), ContentPiece(" and"), CallBegin("f"), ArgumentsPiece("{}")],
        ),
        ("a <tool_call><tool_call>{}", [ContentPiece("a <tool_call><tool_call>{}")]),
    ],
)
def test_hermes_parser_accepts_carelessly_written_calls(text: str, pieces: list[Piece]) -> None:
    assert calls(text, "hermes") == pieces


def test_calls_after_the_first_are_dropped_without_parallel_calls() -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    markup = Markup(calls="hermes", tools=TOOLS, parallel=False)
    assert read([call + "\n" + call], markup) == [CallBegin("f"), ArgumentsPiece("{}")]


@pytest.mark.parametrize(
    ("text", "thinking", "pieces"),
    [
        ("<think>\nhm\n</think>\n\nyes", False, [ReasoningPiece("hm"), ContentPiece("yes")]),
        ("hm\n</think>\n\nyes", True, [ReasoningPiece("hm"), ContentPiece("yes")]),
        ("<think>\nhm\n</think>yes", True, [ReasoningPiece("hm"), ContentPiece("yes")]),
        ("\n<think>\n\n</think>\n\nyes", False, [ContentPiece("yes")]),
        ("no <think>hm</think>", False, [ContentPiece("no <think>hm</think>")]),
        ("<think>cut off </thi", False, [ReasoningPiece("cut off </thi")]),
        ("cut off", True, [ReasoningPiece("cut off")]),
        ("<thi", False, [ContentPiece("<thi")]),
        ("<think>a</think>b</think>c", False, [ReasoningPiece("a"), ContentPiece("b</think>c")]),
    ],
)
def test_reasoning_is_separated_from_content(text: str, thinking: bool, pieces: list[Piece]) -> None:
    assert read([text], Markup(reasoning=True, thinking=thinking)) == pieces


def test_calls_are_parsed_after_reasoning_but_not_within_reasoning() -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    markup = Markup(calls="hermes", tools=TOOLS, reasoning=True)
    assert read([f"<think>{call}</think>{call}"], markup) == [
        ReasoningPiece(call),
        CallBegin("f"),
        ArgumentsPiece("{}"),
    ]


@given(st.lists(OBJECTS | st.lists(JSON, max_size=3), min_size=1, max_size=1), st.sampled_from([None, 1]))
def test_json_scanner_accepts_json_and_detects_its_end(values: list[object], indent: int | None) -> None:
    text = json.dumps(values[0], indent=indent)
    scan = JsonScanner()
    for number, character in enumerate(text, 1):
        assert scan.feed(character)
        assert scan.done == (number == len(text))
    assert not scan.feed(" ")


@given(
    OBJECTS.map(json.dumps), st.integers(0, 200), st.text('{}[]",:\\0123eE.-+ tfn\nu', max_size=2), st.integers(0, 2)
)
@example("{}", 1, '"a":1,', 0)
@example('{"a": 1}', 6, "0", 0)
def test_json_scanner_rejects_invalid_json(text: str, place: int, put: str, gone: int) -> None:
    place %= len(text) + 1
    text = text[:place] + put + text[place + gone :]
    scan = JsonScanner()
    accepted = text[:1] in ("{", "[") and all(scan.feed(character) and (not scan.done or at == len(text) - 1)
                                              for at, character in enumerate(text)) and scan.done  # fmt: skip
    try:
        json.loads(text, strict=False)
        valid = text[:1] in ("{", "[") and text == text.rstrip()
    except json.JSONDecodeError:
        valid = False
    assert accepted == valid


@given(st.text(max_size=30))
def test_call_object_rejects_any_text_without_an_exception(text: str) -> None:
    call = CallObject(TOOLS)
    for character in text:
        if call.ended or not call.feed(character):
            break
    assert not call.ended or call.name in TOOLS


def test_reasoning_reader_holds_back_under_16_characters() -> None:
    reader = ReasoningReader(thinking=True)
    told = 0
    for _ in range(5_000):
        told += sum(len(piece.text) for piece in reader.feed("hm </thin") if isinstance(piece, ReasoningPiece))
    assert told > 5_000 * len("hm </thin") - 16
    assert reader.feed("k>\n\nyes") == [ContentPiece("yes")]

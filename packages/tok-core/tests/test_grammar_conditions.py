"""Schemas with not, if, contains, patternProperties and uniqueItems allow valid texts only, or are refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from support.conditional_schemas import conditional_schema
from support.fuzzing import fuzzed
from support.schemas import random_text
from support.tiny_tokenizer import write_tokenizer
from tok_core.errors import InvalidField
from tok_core.grammar.compiler import Compiled, Compiler
from tok_core.grammar.regex.automata import Automaton
from tok_core.sampling_params import Grammar
from tok_core.text.tokenizer import Tokenizer

VOCAB = 512


class Tiny:
    """The compiler for the small tokenizer, and its tokens."""

    def __init__(self, directory: Path) -> None:
        first = write_tokenizer(directory, VOCAB)
        self.ends = (first + 1, first + 2)
        self.pieces = Tokenizer.load(directory).pieces
        self.compiler = Compiler.load(str(directory), VOCAB, self.ends)

    def compiled(self, schema: Any) -> Compiled:
        return self.compiler.compile(Grammar(kind="json_schema", value=json.dumps(schema)))

    def accepts(self, grammar: Compiled, text: str) -> bool:
        matcher = grammar.matcher()
        return bool(matcher.accept_string(text) and matcher.accept_token(self.ends[0]))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tokenizer"))


@fuzzed(150)
@given(seed=st.integers(0, 2**32))
def test_texts_under_a_conditional_schema_are_valid(tiny: Tiny, seed: int) -> None:
    rng = random.Random(seed)
    schema = conditional_schema(rng)
    jsonschema.Draft202012Validator.check_schema(schema)
    try:
        grammar = tiny.compiled(schema)
    except InvalidField:
        event("refused")
        return
    event("followed")
    for _ in range(6):
        try:
            text = random_text(grammar, tiny.pieces, tiny.ends, rng, 3000).decode()
        except AssertionError as error:
            if "does not end" not in str(error):
                raise
            event("endless")  # items may be any value until one satisfies `contains`
            continue
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


def test_most_random_conditional_schemas_compile(tiny: Tiny) -> None:
    followed = 0
    for seed in range(100):
        try:
            tiny.compiled(conditional_schema(random.Random(seed)))
        except InvalidField:
            continue
        followed += 1
    assert followed >= 50


def tagged(*kinds: str) -> dict[str, Any]:
    """Return a schema of objects whose `kind` decides which other property is required."""
    return {
        "type": "object",
        "properties": {"kind": {"enum": list(kinds)}},
        "required": ["kind"],
        "allOf": [
            {
                "if": {"properties": {"kind": {"const": kind}}},
                "then": {"properties": {kind: {"type": "null"}}, "required": [kind]},
            }
            for kind in kinds
        ],
    }


UNIQUE = {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True}
EXACT: list[tuple[Any, list[str], list[str]]] = [
    ({"type": "string", "not": {"enum": ["a", "ab"]}}, ['"abc"', '""', '"b"'], ['"a"', '"ab"', '"\\u0061"']),
    ({"type": "string", "minLength": 1, "not": {"const": ""}}, ['"a"'], ['""']),
    ({"enum": [1, True, "a"], "not": {"const": 1.0}}, ["true", '"a"'], ["1"]),
    ({"type": ["string", "null", "boolean"], "not": {"enum": [None, True]}}, ["false", '"a"'], ["null", "true"]),
    ({"not": {"type": ["object", "array", "string", "number"]}}, ["null", "true"], ["1", '"a"', "{}"]),
    ({"not": {"not": {"type": "integer"}}}, ["1"], ["1.5", "null"]),
    ({"type": "integer", "not": {"minimum": 3}, "minimum": 0}, ["0", "2"], ["3", "4"]),
    (
        {"type": "object", "properties": {"a": {"type": "null"}}, "not": {"required": ["a"]}},
        ["{}"],
        ['{"a": null}'],
    ),
    (
        {"type": "object", "not": {"properties": {"a": {"const": 1}}}, "properties": {"a": {"enum": [1, 2]}}},
        ['{"a": 2}'],
        ["{}", '{"a": 1}'],
    ),
    ({"allOf": [{"not": {"const": "a"}}, {"not": {"const": "b"}}], "type": "string"}, ['"c"'], ['"a"', '"b"']),
    (tagged("a", "b"), ['{"kind": "a", "a": null}', '{"kind": "b", "b": null}'], ['{"kind": "a"}']),
    (
        {"type": ["integer", "null"], "if": {"type": "integer"}, "then": {"minimum": 3, "maximum": 5}},
        ["3", "5", "null"],
        ["2", "6"],
    ),
    (
        {
            "type": ["integer", "string"],
            "minimum": 1,
            "maximum": 4,
            "maxLength": 1,
            "not": {"maximum": 2, "maxLength": 2},
        },
        ["3", "4"],
        ["2", '"a"'],
    ),
    ({"type": "null", "if": {"type": "null"}}, ["null"], ["1"]),
    ({"type": "null", "then": False, "else": False}, ["null"], ["1"]),
    (
        {"type": "array", "items": {"enum": [1, 2]}, "contains": {"const": 2}, "maxItems": 3},
        ["[2]", "[1, 2]", "[1, 1, 2]", "[2, 2, 1]"],
        ["[]", "[1]", "[1, 1, 1]", "[1, 1, 1, 2]"],
    ),
    (
        {"type": "array", "items": {"enum": [1, 2]}, "contains": {"const": 2}, "minContains": 2, "minItems": 3},
        ["[2, 2, 2]", "[1, 2, 2, 1]", "[1, 1, 1, 2, 1, 2]"],
        ["[2, 2]", "[1, 1, 2]"],
    ),
    ({"contains": {"type": "null"}, "minContains": 0, "type": "array", "items": {"const": 1}}, ["[]", "[1]"], ["1"]),
    (
        {"type": "object", "patternProperties": {"^x-[ab]$": {"type": "null"}}, "additionalProperties": False},
        ["{}", '{"x-a": null, "x-b": null}'],
        ['{"x-c": null}', '{"x-a": 1}', '{"y": 1}'],
    ),
    (
        {"properties": {"x-1": {"enum": [1, "a"]}}, "patternProperties": {"^x": {"type": "string"}}},
        ['{"x-1": "a"}', '{"x": "b"}'],
        ['{"x-1": 1}', '{"x": 1}', '{"y": 1}'],
    ),
    (UNIQUE, ["[]", '["a"]', '["c", "a", "b"]'], ['["a", "a"]', '["a", "b", "c", "a"]']),
    ({**UNIQUE, "minItems": 1, "maxItems": 2}, ['["a"]', '["c", "a"]'], ["[]", '["c", "a", "b"]', '["b", "b"]']),
    ({"type": "array", "items": {"enum": [1, 1.0, True]}, "uniqueItems": True}, ["[1, true]"], ["[1, 1.0]"]),
    (
        {"type": "object", "properties": {"a": {"not": {}}, "b": {"enum": [1]}}},
        ["{}", '{"b": 1}'],
        ['{"a": 1}'],
    ),
    (
        {"anyOf": [{"type": "object", "required": ["a"], "properties": {"a": {"enum": []}}}, {"const": 1}]},
        ["1"],
        ["{}"],
    ),
    ({"allOf": [{"items": {"const": 1}}, {"items": {"const": True}}], "type": "array"}, ["[]"], ["[1]", "[true]"]),
]


@pytest.mark.parametrize(("schema", "good", "bad"), EXACT, ids=lambda value: json.dumps(value)[:60])
def test_conditional_schema_accepts_and_rejects_given_texts(
    tiny: Tiny, schema: Any, good: list[str], bad: list[str]
) -> None:
    grammar = tiny.compiled(schema)
    assert [text for text in good if not tiny.accepts(grammar, text)] == []
    assert [text for text in bad if tiny.accepts(grammar, text)] == []
    for text in good:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


REFUSED: list[tuple[Any, str]] = [
    ({"type": "string", "not": {"pattern": "a"}}, "without 'pattern' (at $)"),
    ({"type": "object", "properties": {"a": {"if": {"items": {}}, "then": False}}}, "without 'items' (at $.a)"),
    ({"not": {"oneOf": [{"type": "null"}]}}, "without 'oneOf' (at $)"),
    ({"type": "integer", "not": {"const": 3}}, "'not' about values of type integer that are not listed (at $)"),
    ({"type": "object", "not": {"const": {}}}, "'not' about values of type object"),
    ({"not": {}}, "something is valid (nothing is at $)"),
    ({"type": "array", "contains": {"type": "null"}, "maxContains": 2}, "maxContains of at least maxItems (at $)"),
    ({"type": "array", "contains": {}, "minContains": 600}, "contains where the items counted"),
    ({"type": "array", "contains": {}, "prefixItems": [True]}, "without prefixItems (at $)"),
    ({"type": "array", "contains": {"type": "null"}, "items": {"const": 1}}, "something is valid"),
    ({"type": "array", "allOf": [{"contains": {"const": 1}}, {"contains": {"const": 2}}]}, "two of 'contains'"),
    ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "'uniqueItems' where items are at most 8"),
    ({"type": "array", "items": {"enum": [*"abcdefghi"]}, "uniqueItems": True}, "'uniqueItems' where items are"),
    ({**UNIQUE, "minItems": 4}, "something is valid: minItems"),
    ({"type": "array", "uniqueItems": 1}, "'uniqueItems' (at $)"),
    ({"type": "object", "patternProperties": {"^[ab]+$": {}, "b": {}}}, "no two match one name"),
    ({"type": "object", "patternProperties": {"^a+$": {}}, "properties": {"aa": {}}}, "the whole of a named property"),
    ({"patternProperties": {"^a$": {}}, "additionalProperties": {"type": "null"}}, "as true or false (at $)"),
    ({"type": "object", "patternProperties": {"(?=a)": {}}}, "regular expressions"),
    ({"type": "object", "patternProperties": []}, "patternProperties as an object"),
    # Some values are valid under both branches, though the grammar of one branch does not allow them.
    ({"type": "number", "oneOf": [{"not": {"type": "integer"}}, {"type": "number"}]}, "oneOf"),
    ({"oneOf": [{"oneOf": [{"minimum": 5}]}, {"type": "string"}]}, "oneOf"),
    ({"oneOf": [{"not": {"const": "a"}}, {"type": "string"}]}, "oneOf"),
    (
        {"type": "string", "oneOf": [{"properties": {"k": {"const": k}}, "required": ["k"]} for k in (1, 2)]},
        "something is valid",
    ),
]


@pytest.mark.parametrize(("schema", "why"), REFUSED, ids=lambda value: json.dumps(value)[:60])
def test_unsupported_conditional_schema_is_refused_with_the_reason(tiny: Tiny, schema: Any, why: str) -> None:
    with pytest.raises(InvalidField) as refused:
        tiny.compiled(schema)
    assert refused.value.field == "grammar"
    assert why in refused.value.allowed


@pytest.mark.parametrize(
    ("pattern", "name", "wide", "certain"),
    [
        ("^x-", "x-y", True, True),
        ("^x-", "ax-", False, False),
        ("a|^b$", "cab", True, True),
        ("a|^b$", "bb", False, False),
        (r"^\d$", "٣", True, False),  # a digit to Python
        (r"^\s$", "\x1f", True, False),
        (r"[^\W]$", "é", True, False),
        ("^a$", "a\n", True, False),
        ("^(ab?){2,3}$", "aab", True, True),
        ("^(ab?){2,3}$", "a", False, False),
        ("", "", True, True),
    ],
)
def test_automaton_searches_a_pattern_in_a_property_name(pattern: str, name: str, wide: bool, certain: bool) -> None:
    assert Automaton(pattern, lambda steps: None, search=True, wide=True).accepts(name) is wide
    assert Automaton(pattern, lambda steps: None, search=True).accepts(name) is certain


def nested(times: int, inner: Any, keyword: str) -> Any:
    for _ in range(times):
        inner = {"type": "array", keyword: inner} if keyword == "contains" else {keyword: inner}
    return inner


def options(count: int) -> list[Any]:
    return [{"if": {"required": [f"p{i}"]}, "then": {"required": [f"q{i}"]}} for i in range(count)]


HOSTILE: list[tuple[Any, str]] = [
    (nested(60, {"type": "null"}, "not"), ""),
    (nested(300, {"type": "null"}, "not"), "nested at most 64"),
    (nested(100, {"type": "null"}, "contains"), "nested at most 64"),
    ({"allOf": options(200)}, "at most 1000 alternatives"),
    (tagged(*(f"k{i}" for i in range(60))), ""),
    (tagged(*(f"k{i}" for i in range(250))), "fewer alternatives"),
    (nested(12, {"type": "array", "items": {"enum": [*"abcdefgh"]}, "uniqueItems": True}, "contains"), ""),
    (
        {
            "properties": {
                f"p{i}": {"type": "array", "items": {"enum": [f"{i}{j}" for j in range(8)]}, "uniqueItems": True}
                for i in range(200)
            }
        },
        "at most 20000 rules",
    ),
    ({"patternProperties": {"^a(x{0,40}){0,40}b$": {}, "^a(x{0,40}){0,40}c$": {}}}, "fewer alternatives"),
    ({"patternProperties": {"((a{0,100}){0,100}){0,100}": {}}}, "at most 2000 states"),
    ({"patternProperties": {"^(a*)*(a*)*(a*)*b$": {}}, "properties": {"a" * 3000: {}}}, ""),
    ({"patternProperties": {f"^p{i}[a-z]{{1,9}}$": {} for i in range(400)}}, "fewer alternatives"),
    ({"$defs": {"a": {"not": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"}, "nested at most 64"),
    ({"$defs": {"a": {"if": {"$ref": "#/$defs/a"}, "then": False}}, "$ref": "#/$defs/a"}, "nested at most 64"),
    ({"type": "array", "contains": {"const": 1}, "minContains": 1 << 30}, "at most 500"),
    (
        {
            "$defs": {"a": {"anyOf": [{"properties": {"a": {"const": i}}} for i in range(30)]}},
            "properties": {
                f"p{i}": {"allOf": [{"$ref": "#/$defs/a"}] * 2, "required": [f"q{i}" * 9]} for i in range(20)
            },
        },
        "fewer alternatives",
    ),
]


def test_hostile_schemas_compile_or_are_refused_with_the_limit(tiny: Tiny) -> None:
    for schema, why in HOSTILE:
        if not why:
            tiny.compiled(schema)
            continue
        with pytest.raises(InvalidField) as refused:
            tiny.compiled(schema)
        assert why in refused.value.allowed

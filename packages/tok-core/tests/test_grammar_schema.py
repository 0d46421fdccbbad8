"""Grammars of JSON schemas allow valid texts only; unsupported keywords are refused by name."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.schemas import random_schema, random_text
from support.tiny_tokenizer import write_tokenizer
from tok_core.errors import InvalidField
from tok_core.grammar.compiler import Compiler
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

    def texts(self, schema: Any, count: int, seed: int = 0) -> list[str]:
        """Return random texts under the schema."""
        grammar = self.compiler.compile(Grammar(kind="json_schema", value=json.dumps(schema)))
        rng = random.Random(seed)
        return [random_text(grammar, self.pieces, self.ends, rng, 2000).decode() for _ in range(count)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tokenizer"))


def check(schema: Any, text: str) -> None:
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_texts_under_a_schema_grammar_are_valid(tiny: Tiny, seed: int) -> None:
    schema = random_schema(random.Random(seed))
    jsonschema.Draft202012Validator.check_schema(schema)
    for text in tiny.texts(schema, 8, seed):
        check(schema, text)


RANGES = st.tuples(st.floats(-1e6, 1e6).map(lambda x: round(x, 5)), st.sampled_from([0.0, 1e-4, 0.7, 3.0, 1e5, 1e9]))


@settings(max_examples=40, deadline=None)
@given(limits=RANGES, kind=st.sampled_from(["number", "integer"]), exclusive=st.booleans(), ends=st.sampled_from("lhb"))
def test_schema_numbers_lie_within_their_bounds(
    tiny: Tiny, limits: tuple[float, float], kind: str, exclusive: bool, ends: str
) -> None:
    low, high = limits[0], limits[0] + limits[1]
    names = ("exclusiveMinimum", "exclusiveMaximum") if exclusive else ("minimum", "maximum")
    schema: dict[str, Any] = {"type": kind}
    if ends in "lb":
        schema[names[0]] = low
    if ends in "hb":
        schema[names[1]] = high
    try:
        texts = tiny.texts(schema, 12)
    except InvalidField as error:  # the bounds may contain no number
        if "bounds that some number lies within" in error.allowed and ends == "b" and high - low < 1:
            return
        raise
    for text in texts:
        check(schema, text)


EXACT: list[tuple[Any, list[str], list[str]]] = [
    ({"type": "integer", "minimum": -3, "maximum": 12}, ["-3", "0", "12"], ["-4", "13", "-0", "03", "1.0"]),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 1.5}, ["0.01", "1", "1.50"], ["0", "0.0", "1.6", "-1"]),
    ({"type": "integer", "minimum": 0, "maximum": 30, "multipleOf": 7}, ["0", "28"], ["1", "35"]),
    ({"type": "string"}, ['"a\\n\\u00e9\\"日"', '""'], ['"\n"', '"\\ud800"', '"\\x"', "a"]),
    ({"type": "string", "maxLength": 2}, ['"日🙂"', '""'], ['"abc"']),
    ({"type": "string", "minLength": 40, "maxLength": 41}, [f'"{"x" * 40}"'], [f'"{"x" * 39}"', f'"{"x" * 42}"']),
    ({"type": "string", "pattern": '^["\\\\\n]$'}, ['"\\""', '"\\\\"', '"\\n"'], ['"""', '"\\"']),
    ({"enum": [1, "a", {"b": [True]}]}, ["1", '"a"', '{"b": [true]}'], ["2", '{"b":[true]}']),
    ({"type": "string", "enum": [1, "a"]}, ['"a"'], ["1"]),
    ({"const": 1.5}, ["1.5"], ["1.50"]),
    (
        {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}, "required": ["b"]},
        ['{"b": 2}', '{"a": 1, "b": 2}'],
        ["{}", '{"a": 1}', '{"b": 2, "a": 1}', '{"b": 2, "c": 3}', '{"b":2}'],
    ),
    (
        {"properties": {"a": {"const": 1}, "ab": {"const": 2}}, "additionalProperties": {"const": 3}},
        ["{}", '{"x": 3}', '{"a": 1, "ab": 2, "abc": 3, "": 3}', '{"b": 3}'],
        ['{"a": 3}', '{"ab": 3}', '{"x": 1}', '{"\\u0061": 3}'],
    ),
    ({"type": "object", "required": ["q"]}, ['{"q": [1, null]}'], ["{}", '{"r": 1}']),
    ({"type": "object", "minProperties": 1, "maxProperties": 2}, ['{"a": 1}', '{"a": 1, "b": {}}'], ["{}"]),
    ({"type": "object", "properties": {"a": False, "b": True}}, ["{}", '{"b": 1}'], ['{"a": 1}']),
    ({"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 3}, ["[1, 1]"], ["[1]", "[1, 1, 1, 1]"]),
    (
        {"prefixItems": [{"const": 1}, {"const": 2}], "items": {"const": 3}, "minItems": 1, "maxItems": 3},
        ["[1]", "[1, 2]", "[1, 2, 3]"],
        ["[]", "[1, 3]", "[1, 2, 3, 3]"],
    ),
    ({"prefixItems": [{"const": 1}]}, ["[]", "[1]"], ["[1, 1]"]),
    ({"type": ["integer", "null"], "minimum": 5, "maximum": 6}, ["5", "null"], ["4", "true"]),
    ({"allOf": [{"type": "number", "minimum": 3}, {"type": "integer", "maximum": 4}]}, ["3", "4"], ["5", "3.5"]),
    (
        {
            "allOf": [
                {"properties": {"a": {"const": 1}}, "required": ["a"]},
                {"properties": {"b": {"const": 2}}, "required": ["b"]},
            ],
            "type": "object",
        },
        ['{"a": 1, "b": 2}'],
        ['{"a": 1}'],
    ),
    ({"type": "integer", "anyOf": [{"const": 1}, {"const": "a"}, {"const": 2}]}, ["1", "2"], ['"a"']),
    (
        {"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"},
        ["[]", "[[], [[]]]"],
        ["[1]"],
    ),
    ({"$defs": {"n": {"type": "integer", "maximum": 9}}, "$ref": "#/$defs/n", "minimum": 8}, ["8"], ["7", "10"]),
    ({"$defs": {"größe": {"const": 1}}, "$ref": "#/$defs/gr%C3%B6%C3%9Fe"}, ["1"], ["2"]),
    (
        {"properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"]},
        ['{"next": null}', '{"next": {"next": null}}'],
        ["{}"],
    ),
    ({"$id": "urn:x", "$schema": "x", "x-more": 1, "type": "null", "default": 3}, ["null"], ["1"]),
    (True, ["1", '{"a": [true]}', '"x"', "-1.5e+10"], ["x", "01", "{a}"]),
]


@pytest.mark.parametrize(("schema", "good", "bad"), EXACT, ids=lambda value: json.dumps(value)[:60])
def test_schema_grammar_accepts_and_rejects_given_texts(
    tiny: Tiny, schema: Any, good: list[str], bad: list[str]
) -> None:
    grammar = tiny.compiler.compile(Grammar(kind="json_schema", value=json.dumps(schema)))

    def accepts(text: str) -> bool:
        matcher = grammar.matcher()
        return bool(matcher.accept_string(text) and matcher.accept_token(tiny.ends[0]))

    assert [text for text in good if not accepts(text)] == []
    assert [text for text in bad if accepts(text)] == []
    for text in good:
        check(schema, text)


def test_schema_grammar_leaves_out_properties_and_items_that_never_end(tiny: Tiny) -> None:
    node = {"properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}
    schema = {"properties": {"a": {"$ref": "#/$defs/node"}, "b": {"items": {"$ref": "#/$defs/node"}}}}
    texts = set(tiny.texts({"$defs": {"node": node}, **schema}, 20))
    assert texts == {"{}", '{"b": []}'}


REFUSED: list[tuple[Any, str]] = [
    ({"type": "string", "format": "iri"}, "format as one of"),
    ({"type": "string", "pattern": "a", "minLength": 3}, "one of pattern, format"),
    ({"type": "string", "pattern": "(?=a)"}, "regular expressions"),
    ({"type": "strin"}, "type among"),
    ({"type": []}, "something is valid"),
    ({"enum": []}, "something is valid"),
    (False, "something is valid"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "bounds"),
    ({"type": "integer", "minimum": "3"}, "minimum as a number"),
    ({"type": "number", "multipleOf": 0.1}, "multipleOf a whole number"),
    ({"type": "integer", "multipleOf": 3}, "multipleOf with at most"),
    ({"type": "string", "maxLength": -1}, "natural number"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength of at most"),
    ({"type": "object", "properties": {"a": {}}, "minProperties": 1}, "minProperties"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, "two of 'pattern'"),
    ({"$ref": "#/$defs/none"}, "$ref to what is there"),
    ({"$ref": "other.json"}, "$ref within the schema"),
    ({"type": "object", "minProperties": 2, "maxProperties": 1}, "minProperties is above maxProperties"),
    ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "a value that ends"),
    ({"items": {"anyOf": [{"$ref": "#"}, False]}, "minItems": 1}, "a value that ends"),
    ({"$ref": "#"}, "consist of themselves"),
    ({"anyOf": [{"$ref": "#"}]}, "consist"),
    ({"properties": {"a": 3}}, "a schema, an object or true or false"),
    ({"properties": []}, "properties as an object"),
    ({"required": [1]}, "required as a list"),
    ({"anyOf": []}, "anyOf as a list"),
    ([], "a schema, an object"),
    ({"type": "object", "unknownKeyword": 1}, "'unknownKeyword'"),
    ({"oneOf": [{"minimum": 5}, {"maxLength": 3}]}, "oneOf"),
    ({"oneOf": [{"properties": {"a": {"type": "null"}}, "required": ["a"]}, {"type": "null"}]}, "oneOf"),
    ({"oneOf": [{"enum": ["a", 1]}, {"minimum": 3}]}, "oneOf"),
    ({"type": "object", "propertyNames": {"maxLength": 3}}, "'propertyNames' (at $)"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "'dependentRequired' (at $)"),
    ({"allOf": [{"not": {"type": "null"}}, {"type": "null"}]}, "something is valid (nothing is at $)"),
    ({"allOf": [{"prefixItems": [{"type": "null"}]}, {"prefixItems": 3}]}, "prefixItems as a list"),
    ({"type": "array", "items": {"type": "null"}, "unevaluatedItems": {"type": "null"}}, "'unevaluatedItems'"),
]


@pytest.mark.parametrize("text", ["1e400", "-1e400", "[1, 1e999]", '{"a": 1e400}'])
def test_schema_with_numbers_beyond_float64_is_refused(tiny: Tiny, text: str) -> None:
    for name, value in (("const", text), ("enum", f"[0, {text}]"), ("enum", f"[[{text}]]")):
        with pytest.raises(InvalidField, match=f"allowed: {name} with numbers of at most"):
            tiny.compiler.compile(Grammar(kind="json_schema", value=f'{{"{name}": {value}}}'))
    for name in ("minimum", "maximum", "multipleOf", "maxLength", "maxItems"):
        with pytest.raises(InvalidField, match="grammar is"):
            tiny.compiler.compile(
                Grammar(kind="json_schema", value=f'{{"type": ["number", "string", "array"], "{name}": {text}}}')
            )


COMBINED: list[Any] = [
    {"type": "array", "allOf": [{"prefixItems": [{}, {"type": "integer"}]}, {"items": {"enum": [1, "a", None]}}]},
    {
        "type": "array",
        "minItems": 3,
        "allOf": [
            {"prefixItems": [{"type": "boolean"}], "items": {"type": ["integer", "null"]}},
            {"prefixItems": [{}, {"type": "null"}], "items": {"enum": [3, None, "b"]}},
        ],
    },
    {"type": "array", "allOf": [{"items": {"enum": [1, 2]}}, {"items": {"enum": [2, 3]}}], "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "null"}, False, {"type": "null"}]},
    {"type": "array", "unevaluatedItems": False},
    {"type": "array", "prefixItems": [{"enum": [1]}, {"enum": [2]}], "unevaluatedItems": False},
    {"type": "array", "items": {"enum": [1]}, "unevaluatedItems": False, "maxItems": 3},
    {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": 1},
    {"oneOf": [{"type": "integer", "minimum": 5, "maximum": 9}, {"type": "string", "maxLength": 3}, {"const": None}]},
]


@pytest.mark.parametrize("schema", COMBINED, ids=lambda schema: json.dumps(schema)[:60])
def test_texts_under_combined_keywords_are_valid(tiny: Tiny, schema: Any) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)
    for text in tiny.texts(schema, 30):
        check(schema, text)


@pytest.mark.parametrize(("schema", "why"), REFUSED, ids=lambda value: json.dumps(value)[:60])
def test_invalid_or_unsupported_schema_is_refused_with_the_reason(tiny: Tiny, schema: Any, why: str) -> None:
    with pytest.raises(InvalidField) as refused:
        tiny.compiler.compile(Grammar(kind="json_schema", value=json.dumps(schema)))
    assert refused.value.field == "grammar"
    assert why in refused.value.allowed


@pytest.mark.parametrize("value", ["", "{", "{'a': 1}", '{"minimum": NaN}', "[" * 100_000, '{"a":' * 20_000])
def test_schema_that_is_no_json_is_refused(tiny: Tiny, value: str) -> None:
    with pytest.raises(InvalidField, match="grammar is"):
        tiny.compiler.compile(Grammar(kind="json_schema", value=value))


def test_schemas_over_a_size_limit_are_refused(tiny: Tiny) -> None:
    deep: Any = {"type": "null"}
    for _ in range(100):
        deep = {"type": "array", "items": deep}
    wide = {"allOf": [{"anyOf": [{"minimum": i}, {"maximum": i}]} for i in range(40)]}
    many = {"properties": {f"p{i}": {"const": i} for i in range(8000)}}
    long = {"type": "string", "pattern": "(abc){9000}{9000}"}
    for schema, why in (
        (deep, "nested at most"),
        (wide, "at most 1000 alternatives"),
        (many, "rules"),
        (long, "stands at"),
    ):
        with pytest.raises(InvalidField) as refused:
            tiny.compiler.compile(Grammar(kind="json_schema", value=json.dumps(schema)))
        assert why in refused.value.allowed


def test_comparing_schema_alternatives_is_bounded_in_time(tiny: Tiny) -> None:
    alike = {"properties": {"a": {"type": "string"}}, "required": ["a", "b", "c"]}
    hostile: list[Any] = [
        {"oneOf": [{"properties": {"a": {"const": i}}, "required": ["a"]} for i in range(980)]},
        {"oneOf": [{"const": i} for i in range(1001)]},
        {"anyOf": [alike] * 1001},
        {"oneOf": [{"enum": [[i, "x"] for i in range(start, start + 2000)]} for start in (0, 5000)]},
        {"allOf": [{"enum": [f"{i}" for i in range(start, start + 3000)]} for start in (0, 1)]},
        {"properties": {f"p{i}": {"$ref": "#"} for i in range(2500)}},
    ]
    begun = time.process_time()
    for schema in hostile:
        with pytest.raises(InvalidField, match=r"at most 1000 alternatives|fewer alternatives") as refused:
            tiny.compiler.compile(Grammar(kind="json_schema", value=json.dumps(schema)))
        assert refused.value.field == "grammar"
    assert time.process_time() - begun < 20
    codes = {"oneOf": [{"const": f"c{i}", "title": f"{i}"} for i in range(250)]}
    kinds = [{"properties": {"kind": {"const": f"k{i}"}}, "required": ["kind"]} for i in range(60)]
    for schema in (codes, {"oneOf": kinds}):
        tiny.compiler.compile(Grammar(kind="json_schema", value=json.dumps(schema)))


def test_json_object_grammar_generates_json_objects(tiny: Tiny) -> None:
    grammar = tiny.compiler.compile(Grammar(kind="json_object"))
    rng = random.Random(4)
    for _ in range(8):
        assert isinstance(json.loads(random_text(grammar, tiny.pieces, tiny.ends, rng, 5000)), dict)

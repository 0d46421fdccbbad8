"""Grammars made at random: each is refused or can be followed, within bounded time; none ends who looks at it."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from support.conditional_schemas import conditional_schema
from support.fuzzing import TEXTS, VALUES, changed, fuzzed, tokens, torn
from support.schemas import random_schema, random_text
from support.tiny_tokenizer import write_tokenizer
from tok_core.errors import InvalidField
from tok_core.grammar.checker import Checker, GrammarLimits
from tok_core.grammar.compiler import Compiler
from tok_core.grammar.worker_processes.examiner import ProcessExaminer
from tok_core.sampling_params import Grammar, Kind
from tok_core.text.tokenizer import Tokenizer

VOCABULARY = 512
CPU_SECONDS = 4
WAIT = 120.0  # of other processes' making: one takes at most CPU_SECONDS of its own

KEYWORDS = (
    *("type", "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "items"),
    *("prefixItems", "minItems", "maxItems", "uniqueItems", "contains", "enum", "const", "anyOf", "oneOf", "allOf"),
    *("not", "if", "then", "else", "$ref", "$defs", "definitions", "minimum", "maximum", "exclusiveMinimum"),
    *("exclusiveMaximum", "multipleOf", "minLength", "maxLength", "pattern", "format", "minProperties"),
    *("maxProperties", "dependentRequired", "title", "default", "$id", "$anchor", "nonsense"),
)
WORDS = st.sampled_from(
    [
        "string",
        "integer",
        "number",
        "object",
        "array",
        "boolean",
        "null",
        "#",
        "#/$defs/a",
        "#/properties/a",
        "a",
        "date",
    ]
)
NONSENSE = st.recursive(
    VALUES | WORDS,
    lambda inner: st.dictionaries(st.sampled_from(KEYWORDS) | WORDS, inner, max_size=5) | st.lists(inner, max_size=4),
    max_leaves=16,
)
SCHEMAS = [make(random.Random(seed)) for make in (random_schema, conditional_schema) for seed in range(40)]
REGEX = (
    *(
        "a",
        "b",
        "0",
        " ",
        ".",
        "|",
        "(",
        ")",
        "(?:",
        "(?i)",
        "(?=",
        "(?!",
        "(?<=",
        "(?P<n>",
        "[",
        "]",
        "[^",
        "-",
        "^",
        "$",
    ),
    *("*", "+", "?", "*?", "{2}", "{1,3}", "{,5}", "{3,}", "{9999}", "{", "}", "\\", "\\d", "\\w", "\\b", "\\1"),
    *("\\x41", "\\u00e9", "\\p{L}", "[[:alpha:]]", "\\Q", "é", "日本", "[a-z]", "[z-a]"),
)
EBNF = (
    *(
        "root",
        " ::= ",
        "a",
        "b",
        " ",
        "\n",
        '"x"',
        '"',
        "'y'",
        "|",
        "(",
        ")",
        "*",
        "+",
        "?",
        "{2,3}",
        "{",
        "}",
        "[a-z]",
    ),
    *(
        "[^",
        "]",
        "\\",
        "#",
        '""',
        "\\x",
        "::=",
        ":",
        "=",
        "root ::= a\n",
        "a ::= ",
        "(=",
        "TagDispatch(",
        ",",
        "\\u00e9",
    ),
)
TERMS = (
    *('"x"', "a", "b", "root", "[a-z0]", "[^a]", '""', "|", '| ""', "( a )", '( b | "y" )', "a*", "b+", "root?"),
    *("a{2,3}", '"\\u00e9"', "( root* )*", "b{0,9}", "a{1000}"),
)
RULES = [
    'root ::= a | b "x"*\na ::= [a-z]+ b?\nb ::= "y" {2,3} | "z"\n',
    'root ::= "[" (root ("," root)*)? "]" | a\na ::= "\\"" [^"\\\\]* "\\"" # a comment\n',
]


def rules() -> st.SearchStrategy[str]:
    """Rules that are well formed, and may go round in circles."""
    rule = st.lists(st.sampled_from(TERMS), max_size=5).map(" ".join)
    return st.tuples(rule, rule, rule).map("root ::= {0[0]}\na ::= {0[1]}\nb ::= {0[2]}\n".format)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


class Tiny:
    """A tokenizer, what compiles for it, and a process that looks at what strangers write."""

    def __init__(self, directory: Path) -> None:
        begin = write_tokenizer(directory, VOCABULARY)
        self.ends = (begin + 1, begin + 2)
        self.pieces = Tokenizer.load(directory).pieces
        self.compiler = Compiler.load(str(directory), VOCABULARY, self.ends)
        self.checker = Checker(
            ProcessExaminer(GrammarLimits(str(directory), VOCABULARY, self.ends, cpu_seconds=CPU_SECONDS))
        )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    found = Tiny(tmp_path_factory.mktemp("fuzzed"))
    yield found
    found.checker.close()


def check(tiny: Tiny, kind: Kind, value: str) -> None:
    """It is refused, by its size or by what looks at it, or texts are made under it."""
    began = time.monotonic()
    try:
        grammar = Grammar(kind=kind, value=value)
    except InvalidField:
        return
    refusal = tiny.checker.begin(grammar).result(WAIT)  # EngineError where its process dies of it
    event("refused" if refusal else "followed")
    if not refusal:
        follow(tiny, grammar)
    assert time.monotonic() - began < WAIT


def follow(tiny: Tiny, grammar: Grammar) -> None:
    """What may be followed always has a next token, until it may end; but rules that someone wrote may lead nowhere."""
    compiled = tiny.compiler.compile(grammar)
    try:
        random_text(compiled, tiny.pieces, tiny.ends, random.Random(1), 40)
    except AssertionError as error:
        if "does not end" not in str(error) and grammar.kind != "ebnf":
            raise


@fuzzed(60)
@given(st.dictionaries(st.sampled_from(KEYWORDS), NONSENSE, max_size=4) | NONSENSE)
def test_no_schema_is_too_odd(tiny: Tiny, schema: Any) -> None:
    check(tiny, "json_schema", json.dumps(schema))


@fuzzed(60)
@given(changed(SCHEMAS))
def test_no_change_makes_a_schema_too_odd(tiny: Tiny, schema: Any) -> None:
    check(tiny, "json_schema", json.dumps(schema))


@fuzzed(80)
@given(tokens(REGEX, 12))
def test_no_regular_expression_is_too_odd(tiny: Tiny, expression: str) -> None:
    check(tiny, "regex", expression)


@fuzzed(80)
@given(tokens(EBNF, 12).map("root ::= ".__add__) | torn([rule.encode() for rule in RULES]).map(_text) | rules())
def test_no_rules_are_too_odd(tiny: Tiny, text: str) -> None:
    check(tiny, "ebnf", text)


@fuzzed(30)
@given(st.lists(TEXTS, max_size=5) | VALUES)
def test_no_choice_is_too_odd(tiny: Tiny, choice: object) -> None:
    check(tiny, "choice", json.dumps(choice))

"""Fuzz grammars: each is refused or can be followed in bounded time, and none kills its checker."""

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
WAIT = 120.0  # seconds, mostly for other processes on the machine: a check takes at most CPU_SECONDS

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
LARK = (
    *(
        "start",
        "a",
        "B",
        ":",
        " ",
        "\n",
        "\na: ",
        "\nB: ",
        '"x"',
        '"y"i',
        "/[a-z]/",
        "/(/",
        "(",
        ")",
        "|",
        "*",
        "+",
        "?",
    ),
    *(
        "~2",
        "~1..3",
        "[",
        "]",
        "..",
        "->",
        "%import common.INT\n",
        "%ignore B\n",
        "%json {}",
        "<|eot_id|>",
        "{",
        "//",
        "é",
    ),
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
    """Return well-formed EBNF rules that may be circular."""
    rule = st.lists(st.sampled_from(TERMS), max_size=5).map(" ".join)
    return st.tuples(rule, rule, rule).map("root ::= {0[0]}\na ::= {0[1]}\nb ::= {0[2]}\n".format)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


class Tiny:
    """A tokenizer, its compiler, and a checker that examines grammars in a process."""

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
    """Assert that the grammar is refused by its size or by the checker, or that texts can be generated under it."""
    began = time.monotonic()
    try:
        grammar = Grammar(kind=kind, value=value)
    except InvalidField:
        return
    refusal = tiny.checker.begin(grammar).result(WAIT)  # raises EngineError if the grammar kills its process
    event("refused" if refusal else "followed")
    if not refusal:
        follow(tiny, grammar)
    assert time.monotonic() - began < WAIT


def follow(tiny: Tiny, grammar: Grammar) -> None:
    """Assert that each state of the grammar has a next token or may end; EBNF and Lark rules may have dead ends."""
    compiled = tiny.compiler.compile(grammar)
    try:
        random_text(compiled, tiny.pieces, tiny.ends, random.Random(1), 40)
    except AssertionError as error:
        if "does not end" not in str(error) and grammar.kind not in ("ebnf", "lark"):
            raise


@fuzzed(60)
@given(st.dictionaries(st.sampled_from(KEYWORDS), NONSENSE, max_size=4) | NONSENSE)
def test_random_schemas_are_refused_or_followed(tiny: Tiny, schema: Any) -> None:
    check(tiny, "json_schema", json.dumps(schema))


@fuzzed(60)
@given(changed(SCHEMAS))
def test_mutated_schemas_are_refused_or_followed(tiny: Tiny, schema: Any) -> None:
    check(tiny, "json_schema", json.dumps(schema))


@fuzzed(80)
@given(tokens(REGEX, 12))
def test_random_regular_expressions_are_refused_or_followed(tiny: Tiny, expression: str) -> None:
    check(tiny, "regex", expression)


@fuzzed(80)
@given(tokens(EBNF, 12).map("root ::= ".__add__) | torn([rule.encode() for rule in RULES]).map(_text) | rules())
def test_random_ebnf_rules_are_refused_or_followed(tiny: Tiny, text: str) -> None:
    check(tiny, "ebnf", text)


@fuzzed(80)
@given(tokens(LARK, 12).map("start: ".__add__))
def test_random_lark_rules_are_refused_or_followed(tiny: Tiny, text: str) -> None:
    check(tiny, "lark", text)


@fuzzed(30)
@given(st.lists(TEXTS, max_size=5) | VALUES)
def test_random_choices_are_refused_or_followed(tiny: Tiny, choice: object) -> None:
    check(tiny, "choice", json.dumps(choice))

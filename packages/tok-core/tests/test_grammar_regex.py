"""Regular expressions compile to grammars that match the same texts as Python's `re`; other syntax is refused."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tok_core.errors import InvalidField
from tok_core.grammar.compiler import Compiled, Compiler
from tok_core.sampling_params import Grammar

END = 256
COMPILER = Compiler([bytes([byte]) for byte in range(256)], 257, [END])
ATOMS = st.sampled_from(["a", "b", "c", "[ab]", "[^a]", ".", r"\w", "[a-c]", r"\x61", "[^b-c]"])
TIMES = st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{0,2}", "{2,}", "{1,3}", "*?", "+?", "??"])


def patterns(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("({}|{})".format, inner, inner),
        st.builds("(?:{}|{}|)".format, inner, inner),
        st.builds("({}){}".format, inner, TIMES),
    )


def compiled(pattern: str) -> Compiled:
    return COMPILER.compile(Grammar(kind="regex", value=pattern))


def accepts(grammar: Compiled, text: bytes) -> bool:
    matcher = grammar.matcher()
    return all(matcher.accept_token(byte) for byte in text) and matcher.accept_token(END)


TEXTS = ["".join(letters) for size in range(5) for letters in itertools.product("abc", repeat=size)]


@settings(max_examples=60, deadline=None)
@given(st.recursive(ATOMS, patterns, max_leaves=8))
def test_regex_grammar_matches_the_same_texts_as_python_re(pattern: str) -> None:
    grammar = compiled(pattern)
    for text in TEXTS:
        assert accepts(grammar, text.encode()) == bool(re.fullmatch(pattern, text)), text


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"^\d{3}-\w+$", ["123-a_9"], ["12-a", "123-", "１２３-a"]),
        ("^a|b$", ["a", "b"], ["ab", ""]),
        (r"[\]\-x]", ["]", "-", "x"], ["\\"]),
        ("[a-]", ["a", "-"], ["b"]),
        (r"\s\S", [" x", "\tx"], ["  ", "x "]),
        (r"[^\d]", ["x", " "], ["1", "é", "٣"]),
        (r"\D\W", ["x-"], ["1-", "xx", "é-"]),
        ("(?P<year>[0-9]{4})(?<sep>/)x", ["2024/x"], ["2024x"]),
        (".", ["é", "日", "🙂", "\t"], ["\n", "\r", "\u2028", "ab"]),
        (r"[^a]", ["\n", "é", "\U0010ffff"], ["a"]),
        ("日{1,2}", ["日", "日日"], ["", "日日日"]),
        (r"\x41B\/\.", ["AB/."], ["ABx."]),
        ("(|x)y", ["y", "xy"], ["x"]),
    ],
)
def test_regex_syntax_common_to_all_dialects_is_supported(pattern: str, good: list[str], bad: list[str]) -> None:
    grammar = compiled(pattern)
    assert [text for text in good if not accepts(grammar, text.encode())] == []
    assert [text for text in bad if accepts(grammar, text.encode())] == []


def test_regex_grammar_rejects_invalid_utf8() -> None:
    grammar = compiled(r"[\x01-\uffff]|[^a-z]")
    for text in (b"\xe0\x8d\x93", b"\xc0\x80", b"\xed\xa0\x80", b"\xf0\x8f\xbf\xbf", b"\xf4\x90\x80\x80", b"\xff"):
        assert not accepts(grammar, text)


@pytest.mark.parametrize(
    "pattern",
    [
        *("(a", "a)", "[a", "a**", "a{2}{3}", "{2}", "a{3,2}", "a{,3}", "a{1,99999}", "*a", "a\\"),
        *("[b-a]", "[]a]", "[^]a]"),
        *("(?=a)", "(?!a)", "(?<=a)b", "(?i)a", r"(a)\1", r"\bx", r"\p{L}", r"\k<a>", "x^", "$x", r"\x4", r"\ud800"),
        *("(" * 100 + ")" * 100, "((a{1000}){1000}){1000}", "(" * 5000),
    ],
)
def test_unsupported_regex_is_refused_with_a_reason(pattern: str) -> None:
    with pytest.raises(InvalidField, match="grammar is") as refused:
        compiled(pattern)
    assert refused.value.field == "grammar"
    assert refused.value.allowed.startswith(("regular expressions that a grammar can say", "repetitions"))


@pytest.mark.parametrize("pattern", ["(a|b)*a(a|b){12}", "(a*)*b", "(a|a)*c", "(x+x+)+y"])
def test_regex_with_catastrophic_backtracking_rejects_a_long_text(pattern: str) -> None:
    assert not accepts(compiled(pattern), b"a" * 2000 + b"!")


def test_choice_grammar_accepts_exactly_its_texts() -> None:
    choices = ["yes", "no", "no way", 'a "b"\n\\', "日本 🙂", "[x]*"]
    grammar = COMPILER.compile(Grammar(kind="choice", value=json.dumps(choices)))
    assert all(accepts(grammar, text.encode()) for text in choices)
    assert not any(accepts(grammar, text) for text in (b"", b"yesno", b"ye", b"no w", b"xx"))


@pytest.mark.parametrize("value", ["", "[]", "{}", '["a", 1]', '[""]', '"a"', '["\\u0000"]', '["a"'])
def test_invalid_choice_grammar_is_refused(value: str) -> None:
    with pytest.raises(InvalidField, match="grammar is"):
        COMPILER.compile(Grammar(kind="choice", value=value))


def test_ebnf_rules_follow_xgrammar_and_its_errors_are_reported() -> None:
    grammar = COMPILER.compile(Grammar(kind="ebnf", value='root ::= "a" more?\nmore ::= [b-c]+\n'))
    assert accepts(grammar, b"abcb")
    assert not accepts(grammar, b"abd")
    for rules in ("root ::= x", "other ::= 'a'", "root ::= (", ""):
        with pytest.raises(InvalidField, match="rules that xgrammar understands"):
            COMPILER.compile(Grammar(kind="ebnf", value=rules))
    with pytest.raises(InvalidField, match="some text"):
        COMPILER.compile(Grammar(kind="ebnf", value='root ::= root "a"'))


def test_lark_rules_follow_xgrammar_and_its_errors_are_reported() -> None:
    rules = '?start: sum\n?sum: item (("+" | "-") item)*\n?item: NUMBER | "(" sum ")"\n%import common.INT -> NUMBER\n'
    grammar = COMPILER.compile(Grammar(kind="lark", value=rules))
    assert accepts(grammar, b"1+(22-3)")
    assert not accepts(grammar, b"1+(22-3")
    for wrong in ("start: x", "other: 'a'", "start: (", "", 'start: x{"a"}\nx{y}: y', "start: " + "(" * 50_000):
        with pytest.raises(InvalidField, match="rules that xgrammar understands"):
            COMPILER.compile(Grammar(kind="lark", value=wrong))
    with pytest.raises(InvalidField, match="without %json"):
        COMPILER.compile(Grammar(kind="lark", value='start: %json {"type": "integer"}'))
    with pytest.raises(InvalidField, match="some text"):
        COMPILER.compile(Grammar(kind="lark", value='start: start "a"'))


def test_grammar_prefix_and_suffix_are_part_of_the_text() -> None:
    grammar = COMPILER.compile(Grammar(kind="regex", value="[0-9]", prefix="<n>\n", suffix='"</n>'))
    assert accepts(grammar, b'<n>\n7"</n>')
    assert not accepts(grammar, b"7")

"""Build the expressions for JSON strings: characters with their escapes, lengths, patterns and formats."""

from __future__ import annotations

import json
from typing import Final

from tok_core.grammar.regex import (
    LAST,
    Spans,
    Unsatisfiable,
    Unsupported,
    cached,
    characters,
    common,
    complement,
    either,
    literal,
    one_of,
    regex,
    repeat,
    sequence,
)
from tok_core.grammar.rules import Rules
from tok_core.grammar.rules import literal as rules_literal
from tok_core.grammar.rules import sequence as sequence_of

QUOTE: Final = literal('"')
MAX_STRING_LENGTH: Final = 1_000_000
STEPS_PER_EXCLUDED_CHAR, STEPS_PER_PATTERN_CHAR = 20, 10  # steps of `Rules.work`
MAX_COUNTED_CHARS: Final = 32  # characters that an automaton counts; with more, it would have too many states

_BACKSLASH: Final = literal("\\")
_PLAIN: Final = complement(one_of('"\\'), ((0x20, LAST),))  # characters that need no escape
_REST: Final = sequence(repeat(characters(_PLAIN), 0, None), QUOTE)  # of a string
_SHORT: Final[dict[int, str]] = {0x22: '"', 0x5C: "\\", 0x08: "b", 0x0C: "f", 0x0A: "n", 0x0D: "r", 0x09: "t"}
_UNICODE: Final = "u([0-9a-cA-CefEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2})"  # without halves of surrogate pairs
_ANY: Final = either([characters(_PLAIN), sequence(_BACKSLASH, either([characters(one_of('"\\/bfnrt')), _UNICODE]))])
_BYTE: Final = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LABEL: Final = "[a-zA-Z0-9]([-a-zA-Z0-9]{0,61}[a-zA-Z0-9])?"
_YEAR: Final = "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LONG: Final = "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
_DATE: Final = f"{_YEAR}-({_LONG}|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_TIME: Final = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+\-]([01][0-9]|2[0-3]):[0-5][0-9])"

FORMATS: Final[dict[str, str]] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": r"P([0-9]{1,6}W|([0-9]{1,6}D|[0-9]{1,6}M([0-9]{1,6}D)?|[0-9]{1,6}Y([0-9]{1,6}M([0-9]{1,6}D)?)?)"
    r"(T([0-9]{1,6}S|[0-9]{1,6}M([0-9]{1,6}S)?|[0-9]{1,6}H([0-9]{1,6}M([0-9]{1,6}S)?)?))?"
    r"|T([0-9]{1,6}S|[0-9]{1,6}M([0-9]{1,6}S)?|[0-9]{1,6}H([0-9]{1,6}M([0-9]{1,6}S)?)?))",
    "email": rf"[a-zA-Z0-9_+\-]{{1,32}}(\.[a-zA-Z0-9_+\-]{{1,16}}){{0,2}}@({_LABEL}\.){{1,4}}[a-zA-Z]{{2,24}}",
    "hostname": rf"({_LABEL}\.){{0,4}}{_LABEL}",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
    "ipv6": "([0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}",
    "uuid": "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
}
"""Regular expressions of the supported formats, for some of the valid texts: no leap days, only short addresses."""


def dumps(value: object) -> str:
    """Return a value as JSON, in the notation that the grammar uses throughout."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def string(least: int, most: int | None, rules: Rules) -> str:
    """Return the expression for strings of `least` to `most` characters, unescaped if their number is limited."""
    if max(least, most or 0) > MAX_STRING_LENGTH:
        raise Unsupported(f"lengths of at most {MAX_STRING_LENGTH}")
    if most is not None and most < least:
        raise Unsatisfiable("minLength of at most maxLength")
    if most is None and least == 0:
        return rules.regular(sequence(QUOTE, repeat(_ANY, 0, None), QUOTE))
    plain = characters(_PLAIN)
    if (least if most is None else most) <= MAX_COUNTED_CHARS:
        return rules.regular(sequence(QUOTE, repeat(plain, least, most), QUOTE))
    return rules.rule(
        sequence_of([rules_literal('"'), rules.repeat(rules.regular(plain), least, most), rules_literal('"')])
    )


def matching(pattern: str, rules: Rules) -> str:
    """Return the expression for strings that match the regular expression as a whole."""
    rules.work(STEPS_PER_PATTERN_CHAR * len(pattern))
    return rules.regular(sequence(QUOTE, regex(pattern, _escaped), QUOTE))


def other_than(names: list[str], rules: Rules) -> str:
    """Return the expression for strings, without escapes, that differ from all of the names."""
    rules.work(STEPS_PER_EXCLUDED_CHAR * sum(map(len, names)))
    return rules.regular(sequence(QUOTE, _differing(sorted(set(names)))))


def _differing(rest: list[str]) -> str:
    """Return the expression for the rest of a string, closing quotation mark included, that is none of `rest`.

    `rest` is sorted and without duplicates.
    """
    below: dict[str, list[str]] = {}
    for name in filter(None, rest):
        below.setdefault(name[0], []).append(name[1:])
    options = [] if "" in rest else [QUOTE]
    options.append(sequence(_plain_except("".join(below)), _REST))
    reachable = {head: names for head, names in below.items() if _plain_except(head) != _plain_except("")}
    return either([*options, *(sequence(literal(head), _differing(names)) for head, names in reachable.items())])


@cached
def _plain_except(heads: str) -> str:
    """Return the expression for a character that needs no escape and is none of `heads`."""
    return characters(complement(one_of(heads), _PLAIN))


@cached
def _escaped(spans: Spans) -> str:
    """Return the expression for one character of the set, escaped where necessary.

    Control characters without a short escape are left out, unless the set has no other characters.
    """
    plain = common(spans, _PLAIN)
    options = [characters(plain)] if plain else []
    escapes = "".join(sign for code, sign in _SHORT.items() if any(first <= code <= last for first, last in spans))
    if escapes:
        options.append(sequence(_BACKSLASH, characters(one_of(escapes))))
    if not options:
        codes = [code for first, last in spans for code in range(first, last + 1)]
        options = [literal(f"\\u{code:04x}") for code in codes]
    return either(options)

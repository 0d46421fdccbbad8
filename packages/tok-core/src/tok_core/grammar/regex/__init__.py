"""Convert regular expressions to grammar text and to automata."""

from __future__ import annotations

from tok_core.grammar.regex.automata import Automaton
from tok_core.grammar.regex.character_sets import (
    LAST,
    SURROGATES,
    Spans,
    Unsatisfiable,
    Unsupported,
    cached,
    check_text,
    common,
    complement,
    one_of,
)
from tok_core.grammar.regex.parser import regex
from tok_core.grammar.regex.regular import NOTHING, characters, either, literal, maybe, repeat, sequence

__all__ = [
    "LAST",
    "NOTHING",
    "SURROGATES",
    "Automaton",
    "Spans",
    "Unsatisfiable",
    "Unsupported",
    "cached",
    "characters",
    "check_text",
    "common",
    "complement",
    "either",
    "literal",
    "maybe",
    "one_of",
    "regex",
    "repeat",
    "sequence",
]

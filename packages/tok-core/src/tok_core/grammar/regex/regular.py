"""Write regular expressions in xgrammar's syntax: each becomes one automaton, whose masks are precomputed.

If they were grammar rules instead, xgrammar would check each token that extends beyond a rule's end anew at every step.
Large vocabularies have a hundred thousand such tokens. An expression is text that can stand beside others as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tok_core.grammar.regex.character_sets import LAST, Spans, Unsupported, cached, check_text, common

NOTHING: Final = ""
MAX_REGEX_CHARS = 100_000  # characters of a repetition that is written out
_LENGTHS: Final[Spans] = ((1, 0x7F), (0x80, 0x7FF), (0x800, 0xFFFF), (0x10000, LAST))  # of one to four bytes in UTF-8


def literal(text: str) -> str:
    """Return an expression for exactly this text. Raise Unsupported if it contains the character U+0000."""
    check_text(text)
    return "".join(map(_written, map(ord, text)))


@cached
def characters(spans: Spans) -> str:
    """Return an expression for one character of the set, which must not be empty."""
    if len(spans) == 1 and spans[0][0] == spans[0][1]:  # nearly always
        return f"[{_written(spans[0][0])}]"
    # Split by length in UTF-8: for a range across lengths, xgrammar (0.2.8) accepts overlong forms.
    groups = [common(spans, (length,)) for length in _LENGTHS]
    return either(f"[{''.join(_span(*span) for span in group)}]" for group in groups if group)


def sequence(*parts: str) -> str:
    """Return an expression for the parts in order."""
    return "".join(parts)


def either(options: Iterable[str]) -> str:
    """Return an expression for any of the options, of which there is at least one."""
    distinct = list(dict.fromkeys(options))
    return distinct[0] if len(distinct) == 1 else f"({'|'.join(distinct)})"


def maybe(one: str) -> str:
    """Return an expression for `one` or nothing."""
    # Not "(…)?": if `one` begins or ends with a star, xgrammar (0.2.8) then accepts the starred part alone.
    return f"({one}|)" if one else NOTHING


def repeat(one: str, least: int, most: int | None) -> str:
    """Return an expression for `one` repeated `least` to `most` times; `most` None: unbounded."""
    if most == 0 or not one:
        return NOTHING
    further = 0 if most is None else most - least
    if len(one) * (least + further) > MAX_REGEX_CHARS:
        raise Unsupported(f"repetitions that come to at most {MAX_REGEX_CHARS} characters when written out")
    end = f"({one})*" if most is None else NOTHING
    # Written out: with several bounded repetitions in one expression, xgrammar (0.2.8) accepts too much.
    return one * least + f"({one}" * further + "|)" * further + end


def _span(first: int, last: int) -> str:
    return _written(first) if first == last else f"{_written(first)}-{_written(last)}"


def _written(code: int) -> str:
    character = chr(code)
    if code > 0xFFFF or (character.isascii() and character.isalnum()):
        return character
    return f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}"

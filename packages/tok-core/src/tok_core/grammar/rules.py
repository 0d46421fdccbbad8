"""Build the EBNF text of a grammar from literals, regular expressions, sequences, choices and repetitions.

An expression is text that can stand in a sequence as it is: a rule's name, a literal, or several of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from tok_core.grammar.regex import Unsupported, check_text

MAX_RULES = 20_000
MAX_RULE_WORK = 2_000_000  # steps: some seconds
NOTHING: Final = '""'


class Rules:
    """Rules of one grammar; equal rules are stored once. Methods raise Unsupported if there are too many."""

    def __init__(self) -> None:
        self._bodies: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._work = 0

    def work(self, steps: int) -> None:
        """Count steps of building the rules, each below a microsecond. Raise Unsupported beyond MAX_RULE_WORK."""
        self._work += steps
        if self._work > MAX_RULE_WORK:
            raise Unsupported(
                "schemas with fewer alternatives and values to compare, or fewer references to large parts"
            )

    def rule(self, body: str) -> str:
        """Return the name of a rule with this body."""
        if body in self._bodies:
            return body  # already the name of a rule
        if body not in self._names:
            self._names[body] = name = self.reserve()
            self._bodies[name] = body
        return self._names[body]

    def reserve(self) -> str:
        """Return a name whose body is set later, by `define`: for recursive rules."""
        if len(self._bodies) >= MAX_RULES:
            raise Unsupported(f"what comes to at most {MAX_RULES} rules")
        name = f"r{len(self._bodies)}"
        self._bodies[name] = ""
        return name

    def define(self, name: str, body: str) -> None:
        """Set the body of a reserved name."""
        self._bodies[name] = body

    def regular(self, expression: str) -> str:
        """Return an expression for a regular expression (see `tok_core.grammar.regex.regular`)."""
        if not expression:
            return NOTHING
        quoted = expression.replace("\\", "\\\\").replace('"', '\\"')
        return self.rule(f'Regex("{quoted}")')

    def either(self, options: Iterable[str]) -> str:
        """Return an expression for a choice between the options, of which there is at least one."""
        distinct = list(dict.fromkeys(options))
        return distinct[0] if len(distinct) == 1 else self.rule(" | ".join(distinct))

    def maybe(self, one: str) -> str:
        """Return an expression for `one` or nothing."""
        return one if one == NOTHING else self.rule(f"{NOTHING} | {one}")

    def repeat(self, one: str, least: int, most: int | None) -> str:
        """Return an expression for `one` repeated `least` to `most` times; `most` None: unbounded."""
        if most == 0 or one == NOTHING or (least, most) == (1, 1):
            return NOTHING if most == 0 else one
        name = self.rule(one)
        if most is None:
            return f"{name}*" if least == 0 else f"{name}+" if least == 1 else f"{name}{{{least},}}"
        return f"{name}{{{least},{most}}}"

    def text(self, root: str) -> str:
        """Return the whole grammar; `root` is the body of its root rule."""
        return "".join(f"{name} ::= {body}\n" for name, body in (("root", root), *self._bodies.items()))


def literal(text: str) -> str:
    """Return an expression for exactly this text. Raise Unsupported if it contains the character U+0000."""
    check_text(text)
    return f'"{"".join(map(_written, map(ord, text)))}"'


def sequence(parts: Sequence[str]) -> str:
    """Return an expression for the parts in order."""
    return " ".join(part for part in parts if part != NOTHING) or NOTHING


def _written(code: int) -> str:
    character = chr(code)
    if character.isascii() and (character.isalnum() or character == " "):
        return character
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"

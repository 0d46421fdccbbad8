"""Rules: builds the text of a grammar out of literals, regular expressions, sequences, choices and repetitions.

An expression is text that may stand in a sequence as it is: a rule's name, a literal, or several of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from tok_core.grammar.regex import Unsupported, check_text

MAX_RULES = 20_000
MAX_RULE_WORK = 2_000_000  # some seconds
NOTHING: Final = '""'


class Rules:
    """The rules made so far; equal ones are one. Errors: Unsupported where they are too many."""

    def __init__(self) -> None:
        self._bodies: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._work = 0

    def work(self, steps: int) -> None:
        """Counts steps, below a microsecond each, that making the rules takes. Errors: Unsupported for too many."""
        self._work += steps
        if self._work > MAX_RULE_WORK:
            raise Unsupported(
                "schemas with fewer alternatives and values to compare, or fewer references to large parts"
            )

    def rule(self, body: str) -> str:
        """The name of a rule of that body."""
        if body in self._bodies:
            return body  # a name already
        if body not in self._names:
            self._names[body] = name = self.reserve()
            self._bodies[name] = body
        return self._names[body]

    def reserve(self) -> str:
        """A name whose body is given later, by `define`: for what contains itself."""
        if len(self._bodies) >= MAX_RULES:
            raise Unsupported(f"what comes to at most {MAX_RULES} rules")
        name = f"r{len(self._bodies)}"
        self._bodies[name] = ""
        return name

    def define(self, name: str, body: str) -> None:
        """Gives a reserved name its body."""
        self._bodies[name] = body

    def regular(self, expression: str) -> str:
        """What a regular expression (`tok_core.grammar.regex.regular`) matches."""
        if not expression:
            return NOTHING
        quoted = expression.replace("\\", "\\\\").replace('"', '\\"')
        return self.rule(f'Regex("{quoted}")')

    def either(self, options: Iterable[str]) -> str:
        """One of the expressions, of which there is at least one."""
        distinct = list(dict.fromkeys(options))
        return distinct[0] if len(distinct) == 1 else self.rule(" | ".join(distinct))

    def maybe(self, one: str) -> str:
        """The expression, or nothing."""
        return one if one == NOTHING else self.rule(f"{NOTHING} | {one}")

    def repeat(self, one: str, least: int, most: int | None) -> str:
        """The expression, so many times; `most` None: without end."""
        if most == 0 or one == NOTHING or (least, most) == (1, 1):
            return NOTHING if most == 0 else one
        name = self.rule(one)
        if most is None:
            return f"{name}*" if least == 0 else f"{name}+" if least == 1 else f"{name}{{{least},}}"
        return f"{name}{{{least},{most}}}"

    def text(self, root: str) -> str:
        """The whole grammar."""
        return "".join(f"{name} ::= {body}\n" for name, body in (("root", root), *self._bodies.items()))


def literal(text: str) -> str:
    """Exactly this text. Errors: Unsupported for one with the character 0."""
    check_text(text)
    return f'"{"".join(map(_written, map(ord, text)))}"'


def sequence(parts: Sequence[str]) -> str:
    """One after the other."""
    return " ".join(part for part in parts if part != NOTHING) or NOTHING


def _written(code: int) -> str:
    character = chr(code)
    if character.isascii() and (character.isalnum() or character == " "):
        return character
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"

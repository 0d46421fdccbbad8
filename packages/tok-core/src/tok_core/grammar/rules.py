"""Build the EBNF text of a grammar from literals, regular expressions, sequences, choices and repetitions.

An expression is text that can stand in a sequence as it is: a rule's name, a literal, or several of these.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from tok_core.grammar.regex import Unsupported, check_text

MAX_RULES = 20_000
MAX_RULE_WORK = 2_000_000  # steps: some seconds
CHARS_PER_STEP = 10  # characters of a regular expression that are written in a step
NOTHING: Final = '""'
OR: Final = " | "
_ELEMENT: Final = re.compile(r'"[^"]*"|(r\d+)(\*|\{0,\d*\})?')  # a literal, or a rule's name; group 2: it is optional


class Rules:
    """Rules of one grammar; equal rules are stored once. Methods raise Unsupported if there are too many.

    max_work  steps after which `work` raises Unsupported
    """

    def __init__(self, max_work: int = MAX_RULE_WORK) -> None:
        self._bodies: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._work = 0
        self._max_work = max_work

    def work(self, steps: int) -> None:
        """Count steps of building the rules, each about a microsecond. Raise Unsupported beyond the limit."""
        self._work += steps
        if self._work > self._max_work:
            raise Unsupported(
                "schemas with fewer alternatives and values to compare, shorter patterns, or "
                "fewer references to large parts"
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
        self.work(len(expression) // CHARS_PER_STEP)
        quoted = expression.replace("\\", "\\\\").replace('"', '\\"')
        return self.rule(f'Regex("{quoted}")')

    def either(self, options: Iterable[str]) -> str:
        """Return an expression for a choice between the options, of which there is at least one."""
        distinct = list(dict.fromkeys(options))
        return distinct[0] if len(distinct) == 1 else self.rule(OR.join(distinct))

    def maybe(self, one: str) -> str:
        """Return an expression for `one` or nothing."""
        return one if one == NOTHING else self.rule(f"{NOTHING}{OR}{one}")

    def repeat(self, one: str, least: int, most: int | None) -> str:
        """Return an expression for `one` repeated `least` to `most` times; `most` None: unbounded."""
        if most == 0 or one == NOTHING or (least, most) == (1, 1):
            return NOTHING if most == 0 else one
        name = self.rule(one)
        if most is None:
            return f"{name}*" if least == 0 else f"{name}+" if least == 1 else f"{name}{{{least},}}"
        return f"{name}{{{least},{most}}}"

    def endless(self, expressions: Sequence[str]) -> list[bool]:
        """Return for each expression whether it has no finite text, because a rule that it needs needs itself."""
        ending = self._ending()
        return [not _needed(one) <= ending for one in expressions]

    def text(self, root: str) -> str:
        """Return the whole grammar without alternatives that never end; `root` is the body of its root rule."""
        ending = self._ending()
        bodies = {"root": root, **{name: body for name, body in self._bodies.items() if name in ending}}
        return "".join(f"{name} ::= {_without_endless(body, ending)}\n" for name, body in bodies.items())

    def _ending(self) -> set[str]:
        """Return the rules that have a finite text."""
        needed_by = defaultdict[str, list[tuple[str, set[str]]]](list)
        ready, found = list[str](), set[str]()
        for name, body in self._bodies.items():
            for alternative in _alternatives(body):
                needed = _needed(alternative)
                for one in needed:
                    needed_by[one].append((name, needed))
                if not needed:
                    ready.append(name)
        while ready:
            ended = ready.pop()
            if ended in found:
                continue
            found.add(ended)
            for name, needed in needed_by[ended]:
                needed.discard(ended)
                if not needed:
                    ready.append(name)
        return found


def literal(text: str) -> str:
    """Return an expression for exactly this text. Raise Unsupported if it contains the character U+0000."""
    check_text(text)
    return f'"{"".join(map(_written, map(ord, text)))}"'


def sequence(parts: Sequence[str]) -> str:
    """Return an expression for the parts in order."""
    return " ".join(part for part in parts if part != NOTHING) or NOTHING


def _alternatives(body: str) -> list[str]:
    return [body] if body.startswith("Regex(") else body.split(OR)


def _needed(alternative: str) -> set[str]:
    """Return the rules of which each text of the alternative holds one."""
    if alternative.startswith("Regex("):
        return set()
    return {found[1] for found in _ELEMENT.finditer(alternative) if found[1] and not found[2]}


def _without_endless(body: str, ending: set[str]) -> str:
    """Return the body without alternatives that need a rule that never ends, and without optional uses of one."""
    if body.startswith("Regex("):
        return body
    kept = (one for one in body.split(OR) if _needed(one) <= ending)
    return OR.join(
        _ELEMENT.sub(lambda one: one[0] if not one[1] or one[1] in ending else NOTHING, each) for each in kept
    )


def _written(code: int) -> str:
    character = chr(code)
    if character.isascii() and (character.isalnum() or character == " "):
        return character
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"

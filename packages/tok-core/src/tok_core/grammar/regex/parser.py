"""Parse regular expressions in the syntax that JSON Schema, Python and JavaScript share, as far as grammars express it.

Whole texts match, so `^` and `$` may stand only at the ends and have no effect. The parser refuses constructs that no
grammar can express (look-around, backreferences, word boundaries) or on which dialects disagree (flags, Unicode
properties). `\\d`, `\\w` and `\\s` match ASCII only; `\\D`, `\\W` and `\\S` match the other printable ASCII characters.
Lazy quantifiers match what greedy ones do. A search allows any characters before an alternative without `^` and after
one without `$`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

from tok_core.grammar.regex.character_sets import Spans, Unsupported, complement, union
from tok_core.grammar.regex.regular import either, repeat, sequence

MAX_GROUP_DEPTH = 64
MAX_REPEATS = 10_000

E = TypeVar("E")
Emit = Callable[[Spans], str]
"""Returns the expression for one character of a set."""

_ASCII: Final[Spans] = ((0x20, 0x7E),)
_CLASSES: Final[dict[str, Spans]] = {
    "d": union([(0x30, 0x39)]),
    "w": union([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]),
    "s": union([(0x09, 0x0D), (0x20, 0x20)]),
}
_NAMED: Final[dict[str, int]] = {"n": 10, "t": 9, "r": 13, "f": 12, "v": 11, "0": 0}
_FOREIGN: Final = complement(_ASCII)  # characters that some dialects include in the classes
_EVERY: Final = complement(())
_NEWLINE: Final[Spans] = ((10, 10),)  # which Python ignores before a final $
_ANY: Final = complement(union([(10, 10), (13, 13), (0x85, 0x85), (0x2028, 0x2029)]))  # all but line terminators
_HEX: Final[dict[str, int]] = {"x": 2, "u": 4}


def regex(pattern: str, emit: Emit) -> str:
    """Return the expression that matches what `pattern` does. Raise Unsupported, naming construct and position."""
    return parsed(pattern, _Text(emit))


def parsed(pattern: str, build: Builder[E], *, search: bool = False, wide: bool = False) -> E:
    """Return what `build` makes of `pattern`. Raise Unsupported.

    search  match texts of which a part matches
    wide    also match texts on which dialects disagree; otherwise match none of them
    """
    return _Parser(pattern, build, search, wide).whole()


class Builder(Protocol[E]):
    """Interface that builds an expression from its parts."""

    def one(self, spans: Spans) -> E:
        """Return an expression for one character of the set, which is not empty."""

    def sequence(self, parts: list[E]) -> E:
        """Return an expression for the parts in order."""

    def either(self, options: list[E]) -> E:
        """Return an expression for any of the options, of which there is at least one."""

    def repeat(self, one: E, least: int, most: int | None) -> E:
        """Return an expression for `one` repeated `least` to `most` times; `most` None: unbounded."""


class _Text:
    """Builder of expressions as in `tok_core.grammar.regex.regular`."""

    def __init__(self, emit: Emit) -> None:
        self.one = emit

    def sequence(self, parts: list[str]) -> str:
        return sequence(*parts)

    def either(self, options: list[str]) -> str:
        return either(options)

    def repeat(self, one: str, least: int, most: int | None) -> str:
        return repeat(one, least, most)


class _Parser(Generic[E]):
    """Recursive-descent parser of `pattern` that builds expressions on the way."""

    def __init__(self, pattern: str, build: Builder[E], search: bool, wide: bool) -> None:
        self._pattern = pattern
        self._build = build
        self._search = search
        self._wide = wide
        self._at = 0
        self._depth = 0

    def whole(self) -> E:
        found = self._choice()
        if self._at < len(self._pattern):
            raise self._refused("an unopened group ends")
        return found

    def _choice(self) -> E:
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        return self._build.either(options)

    def _sequence(self) -> E:
        parts = []
        search = self._search and self._depth == 0
        if not (self._depth == 0 and self._take("^")) and search:
            parts.append(self._build.repeat(self._build.one(_EVERY), 0, None))
        bounded = False
        while self._at < len(self._pattern) and self._next() not in "|)":
            if self._next() == "$" and self._depth == 0 and self._pattern[self._at + 1 : self._at + 2] in ("", "|"):
                self._at += 1
                bounded = True
                break
            parts.append(self._quantified(self._atom()))
        if search and not bounded:
            parts.append(self._build.repeat(self._build.one(_EVERY), 0, None))
        elif bounded and self._wide:
            parts.append(self._build.repeat(self._build.one(_NEWLINE), 0, 1))
        return self._build.sequence(parts)

    def _quantified(self, atom: E) -> E:
        start = self._at
        bounds = self._quantifier()
        if bounds is None:
            return atom
        least, most = bounds
        if max(least, most or 0) > MAX_REPEATS or (most is not None and most < least):
            raise self._refused(f"a quantifier beyond 0 to {MAX_REPEATS} stands", start)
        self._take("?")
        if self._at < len(self._pattern) and self._next() in "*+?":
            raise self._refused("a quantifier of a quantifier stands")
        return self._build.repeat(atom, least, most)

    def _quantifier(self) -> tuple[int, int | None] | None:
        for sign, least, most in (("*", 0, None), ("+", 1, None), ("?", 0, 1)):
            if self._take(sign):
                return least, most
        end = self._pattern.find("}", self._at)
        if self._pattern[self._at : self._at + 1] != "{" or end < 0:
            return None
        low, comma, high = self._pattern[self._at + 1 : end].partition(",")
        if not (low.isascii() and low.isdigit() and (high == "" or (high.isascii() and high.isdigit()))):
            raise self._refused("a brace that begins no quantifier stands")
        if len(low) > 6 or len(high) > 6:
            raise self._refused(f"a quantifier beyond 0 to {MAX_REPEATS} stands")
        self._at = end + 1
        return int(low), int(high) if high else None if comma else int(low)

    def _atom(self) -> E:
        sign = self._next()
        if sign == "(":
            return self._group()
        if sign == "[":
            return self._one(self._set())
        if sign in "*+?{}^$":
            raise self._refused(f"{sign!r}, which is allowed there only as \\{sign}, stands")
        self._at += 1
        if sign == "\\" and self._wide and self._pattern[self._at : self._at + 1].lower() in _CLASSES:
            return self._one(union([*self._escape(), *_FOREIGN]))
        if sign == ".":
            return self._one(complement(_NEWLINE) if self._wide else _ANY)
        return self._one(self._escape() if sign == "\\" else union([(ord(sign), ord(sign))]))

    def _group(self) -> E:
        start = self._at
        self._at += 1
        if self._take("?") and not self._take(":"):
            name = self._pattern.find(">", self._at)
            kind = self._pattern[self._at : self._at + 2]
            if not (kind == "P<" or (kind[:1] == "<" and kind[1:] not in ("=", "!"))) or name < 0:
                raise self._refused("a group that looks around, has flags or refers to another begins", start)
            self._at = name + 1
        self._depth += 1
        if self._depth > MAX_GROUP_DEPTH:
            raise self._refused(f"a group nested more than {MAX_GROUP_DEPTH} times begins", start)
        found = self._choice()
        self._depth -= 1
        if not self._take(")"):
            raise self._refused("a group that is not closed begins", start)
        return found

    def _set(self) -> Spans:
        start = self._at
        self._at += 1
        negated = self._take("^")
        if self._pattern.startswith("]", self._at):  # literal in Python; ends the set in JavaScript
            raise self._refused("a set that begins with ']', which is allowed there only as \\], begins", start)
        spans: list[tuple[int, int]] = []
        classes = False
        while True:
            if self._at >= len(self._pattern):
                raise self._refused("a set that is not closed begins", start)
            if self._take("]"):
                break
            first, of_class = self._member()
            classes = classes or of_class
            if not of_class and self._ranges():
                self._at += 1
                last, of_class = self._member()
                if of_class or _code(last) < _code(first):
                    raise self._refused("a set with a range that is none begins", start)
                first = ((_code(first), _code(last)),)
            spans += first
        if classes and self._wide:
            return complement(union(spans)) if negated else union([*spans, *_FOREIGN])
        return complement(union(spans), _ASCII if classes else _EVERY) if negated else union(spans)

    def _ranges(self) -> bool:
        """Return whether a hyphen follows that is not the set's last member."""
        return self._pattern.startswith("-", self._at) and self._pattern[self._at + 1 : self._at + 2] not in ("", "]")

    def _member(self) -> tuple[Spans, bool]:
        """Read one member of a set; return its characters and whether it is a class such as `\\d`."""
        sign = self._next() if self._at < len(self._pattern) else ""
        self._at += 1
        if sign != "\\":
            return ((ord(sign), ord(sign)),) if sign else (), False
        letter = self._pattern[self._at : self._at + 1]
        if letter == "b":
            self._at += 1
            return ((8, 8),), False
        return self._escape(), letter.lower() in _CLASSES

    def _escape(self) -> Spans:
        """Read an escape whose backslash has been read; return its characters."""
        letter = self._pattern[self._at : self._at + 1]
        self._at += 1
        if letter.lower() in _CLASSES:
            spans = _CLASSES[letter.lower()]
            return spans if letter.islower() else complement(spans, _ASCII)
        if letter in _HEX:
            digits = self._pattern[self._at : self._at + _HEX[letter]]
            if len(digits) < _HEX[letter] or any(digit not in "0123456789abcdefABCDEF" for digit in digits):
                raise self._refused("an escape without its digits stands")
            self._at += len(digits)
            return ((int(digits, 16),) * 2,)
        if letter in _NAMED:
            return ((_NAMED[letter],) * 2,)
        if not letter or letter.isalnum():
            raise self._refused(f"the escape \\{letter} stands", self._at - 2)
        return ((ord(letter),) * 2,)

    def _one(self, spans: Spans) -> E:
        found = union(spans)
        if not found:
            raise self._refused("a set without a character that a text may have ends")
        return self._build.one(found)

    def _next(self) -> str:
        return self._pattern[self._at]

    def _take(self, sign: str) -> bool:
        found = self._pattern.startswith(sign, self._at)
        self._at += found
        return found

    def _refused(self, what: str, at: int | None = None) -> Unsupported:
        place = self._at if at is None else at
        return Unsupported(f"regular expressions that a grammar can say; {what} at character {place}")


def _code(spans: Spans) -> int:
    return spans[0][0] if spans else 0

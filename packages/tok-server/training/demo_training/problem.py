"""A word problem with its worked solution, and the random choices that templates make it from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from demo_training.words import NOUNS, PEOPLE, SYLLABLES, Noun, Person, noun

T = TypeVar("T")

FEW, SOME, MANY = (6, 48), (12, 98), (120, 980)
"""Ranges of the numbers of problems with large numbers. They decide how hard the arithmetic is."""

INVENTED_SHARE = 0.08
"""Share of names and things that are invented, so that the model must copy them."""

EQUATION = re.compile(r"(-?\d+) ([-+*/]) (-?\d+) = (-?\d+)")
_NUMBER = re.compile(r"\d+")
_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_STRENGTH = {"+": 1, "-": 1, "*": 2, "/": 2}


@dataclass(frozen=True, slots=True)
class WordProblem:
    """A question, the steps to its answer (one sentence with one equation each), and the answer."""

    question: str
    steps: tuple[str, ...]
    answer: int

    @property
    def solution(self) -> str:
        """Return the steps, then `#### <answer>` on a line of its own (the form of GSM8K, Cobbe et al. 2021)."""
        return "\n".join((*self.steps, f"#### {self.answer}"))

    @property
    def expression(self) -> str:
        """Return all steps as one expression: `4 * 12 + 3 * 5`."""
        known: dict[str, tuple[str, int]] = {}  # an earlier result's expression, and how strongly its operator binds
        given, used = frozenset(_NUMBER.findall(self.question)), set[str]()
        text = ""
        for left, sign, right, result in (equation for step in self.steps for equation in EQUATION.findall(step)):
            strength, parts = _STRENGTH[sign], []
            for operand, weakest in ((left, strength), (right, strength + (sign in "-/"))):
                part, own = known[operand] if operand in known and operand not in given & used else (operand, 3)
                used.add(operand)
                parts.append(f"({part})" if own < weakest else part)
            text = f"{parts[0]} {sign} {parts[1]}"
            known[result] = (text, strength)
            used.discard(result)
        return text

    def concluded(self, result: str) -> str:
        """Return the answer in words, where a tool has computed `result`: `Together they cost 63 dollars.`"""
        last = self.steps[-1]
        if EQUATION.fullmatch(last):
            return f"{self.expression} = {result}\n#### {result}"
        return f"{EQUATION.sub(lambda _: result, last)}\n#### {result}"


class ProblemSampler:
    """Seeded random choices. `divisor` divides the ranges of the numbers: 1 is for the hardest problems."""

    def __init__(self, random: Random, divisor: int = 1) -> None:
        self._random = random
        self._divisor = divisor

    def number(self, low: int, high: int) -> int:
        """Return an integer from `low` to `high`, both included."""
        return low + int(self._random.random() * (high - low + 1))

    def amount(self, low: int, high: int) -> int:
        """Return an integer of a range that the divisor makes smaller."""
        if self._divisor == 1:
            return self.number(low, high)
        return self.number(max(2, low // self._divisor), max(5, high // self._divisor))

    def few(self) -> int:
        """Return a count of rows, weeks or pieces."""
        return self.amount(*FEW)

    def some(self) -> int:
        """Return a price, a size or a speed."""
        return self.amount(*SOME)

    def many(self) -> int:
        """Return a stock or a sum of money."""
        return self.amount(*MANY)

    def happens(self, share: float) -> bool:
        """Return True with that probability."""
        return self._random.random() < share

    def pick(self, options: Sequence[T]) -> T:
        """Return one of `options`."""
        return options[self.number(0, len(options) - 1)]

    def two(self, options: Sequence[T]) -> tuple[T, T]:
        """Return two different elements of `options`."""
        first = self.number(0, len(options) - 1)
        second = (first + self.number(1, len(options) - 1)) % len(options)
        return options[first], options[second]

    def phrase(self, pattern: str) -> str:
        """Return the pattern with one option of each choice: `He [buys|finds] [a[| red]|one] cup.`"""
        while "[" in pattern:
            pattern = _CHOICE.sub(lambda found: self.pick(found[1].split("|")), pattern)
        return pattern

    def person(self) -> Person:
        """Return a person."""
        return self.pair()[0]

    def pair(self) -> tuple[Person, Person]:
        """Return two different people."""
        first, second = self.two(PEOPLE)
        if self.happens(INVENTED_SHARE):
            first = first._replace(name=self.invented().capitalize())
        return first, second

    def noun(self) -> Noun:
        """Return a countable thing."""
        return noun(self.invented()) if self.happens(INVENTED_SHARE) else self.pick(NOUNS)

    def thing(self) -> str:
        """Return a countable thing, in the plural."""
        return self.noun().many

    def invented(self) -> str:
        """Return a word that does not exist."""
        return "".join(self.pick(SYLLABLES) for _ in range(self.number(2, 3)))

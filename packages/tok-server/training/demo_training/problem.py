"""A word problem with its worked solution, and the random choices that templates make it from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from demo_training.words import PEOPLE, THINGS, Person

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WordProblem:
    """A question, the steps to its answer (one sentence a line), and the answer."""

    question: str
    steps: tuple[str, ...]
    answer: int

    @property
    def solution(self) -> str:
        """Return the steps, then `#### <answer>` on a line of its own (the form of GSM8K, Cobbe et al. 2021)."""
        return "\n".join((*self.steps, f"#### {self.answer}"))


class ProblemSampler:
    """Seeded random choices. The ranges of the numbers are set here, because they decide how hard the arithmetic is."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def number(self, low: int, high: int) -> int:
        """Return an integer from `low` to `high`, both included."""
        return low + int(self._random.random() * (high - low + 1))

    def few(self) -> int:
        """Return a count of rows, weeks or pieces."""
        return self.number(4, 28)

    def some(self) -> int:
        """Return a price, a size or a speed."""
        return self.number(12, 98)

    def many(self) -> int:
        """Return a stock or a sum of money."""
        return self.number(120, 980)

    def pick(self, options: Sequence[T]) -> T:
        """Return one of `options`."""
        return options[self.number(0, len(options) - 1)]

    def two(self, options: Sequence[T]) -> tuple[T, T]:
        """Return two different elements of `options`."""
        first = self.number(0, len(options) - 1)
        second = (first + self.number(1, len(options) - 1)) % len(options)
        return options[first], options[second]

    def person(self) -> Person:
        """Return a person."""
        return self.pick(PEOPLE)

    def pair(self) -> tuple[Person, Person]:
        """Return two different people."""
        return self.two(PEOPLE)

    def thing(self) -> str:
        """Return a countable thing, in the plural."""
        return self.pick(THINGS)

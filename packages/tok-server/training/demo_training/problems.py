"""The problem generator: seeded streams of word problems, split into training and held-out problems by their text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from random import Random

from demo_training.problem import ProblemSampler, WordProblem
from demo_training.templates import TEMPLATES, arithmetic, one_step

HELD_OUT_SHARE = 16
"""One question in HELD_OUT_SHARE is held out."""


ARITHMETIC_SHARE, ONE_STEP_SHARE = 0.12, 0.33
"""Shares of the training problems. The others have several steps."""

LARGE_SHARE = 0.6
"""Share of the training problems of several steps that have large numbers, as all held-out ones have."""


def hard_problem(random: Random) -> WordProblem:
    """Return a problem of several steps with large numbers, from either split."""
    draw = ProblemSampler(random)
    return draw.pick(TEMPLATES)(draw)


def simple_problem(random: Random) -> WordProblem:
    """Return a problem of one step or bare arithmetic, from either split."""
    draw = ProblemSampler(random)
    arithmetic_share = ARITHMETIC_SHARE / (ARITHMETIC_SHARE + ONE_STEP_SHARE)
    return arithmetic(draw) if draw.happens(arithmetic_share) else one_step(draw)


def is_held_out(question: str) -> bool:
    """Return whether the question belongs to the held-out split, which a hash of its text alone decides."""
    return blake2b(question.encode(), digest_size=4).digest()[0] % HELD_OUT_SHARE == 0


def training_problem(random: Random) -> WordProblem:
    """Return the next problem that is not held out."""
    while is_held_out((problem := _any_problem(random)).question):
        pass
    return problem


def held_out(count: int, seed: int = 0, make: Callable[[Random], WordProblem] = hard_problem) -> list[WordProblem]:
    """Return `count` different held-out problems that `make` makes; equal seeds give equal problems."""
    return list(islice(_different(Random(seed), make), count))


def write_held_out(file: Path, count: int = 200) -> None:
    """Write held-out problems in GSM8K's form: one `{"question", "answer"}` per line, the answer being the solution."""
    entries = ({"question": one.question, "answer": one.solution} for one in held_out(count))
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")


def _any_problem(random: Random) -> WordProblem:
    if random.random() < ARITHMETIC_SHARE + ONE_STEP_SHARE:
        return simple_problem(random)
    if random.random() < LARGE_SHARE:
        return hard_problem(random)
    draw = ProblemSampler(random, divisor=2 if random.random() < 0.25 else 5)
    return draw.pick(TEMPLATES)(draw)


def _different(random: Random, make: Callable[[Random], WordProblem]) -> Iterator[WordProblem]:
    seen: set[str] = set()
    while True:
        problem = make(random)
        if is_held_out(problem.question) and problem.question not in seen:
            seen.add(problem.question)
            yield problem

"""The problem generator: seeded streams of word problems, split into training and held-out problems by their text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from random import Random

from demo_training.problem import ProblemSampler, WordProblem
from demo_training.templates import TEMPLATES

HELD_OUT_SHARE = 16
"""One question in HELD_OUT_SHARE is held out."""


def any_problem(random: Random) -> WordProblem:
    """Return a problem of any template, from either split."""
    draw = ProblemSampler(random)
    return draw.pick(TEMPLATES)(draw)


def is_held_out(question: str) -> bool:
    """Return whether the question belongs to the held-out split, which a hash of its text alone decides."""
    return blake2b(question.encode(), digest_size=4).digest()[0] % HELD_OUT_SHARE == 0


def training_problem(random: Random) -> WordProblem:
    """Return the next problem that is not held out."""
    while is_held_out((problem := any_problem(random)).question):
        pass
    return problem


def held_out(count: int, seed: int = 0) -> list[WordProblem]:
    """Return `count` different held-out problems; equal seeds give equal problems."""
    return list(islice(_different(Random(seed)), count))


def write_held_out(file: Path, count: int = 200) -> None:
    """Write held-out problems in GSM8K's form: one `{"question", "answer"}` per line, the answer being the solution."""
    entries = ({"question": one.question, "answer": one.solution} for one in held_out(count))
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")


def _different(random: Random) -> Iterator[WordProblem]:
    seen: set[str] = set()
    while True:
        problem = any_problem(random)
        if is_held_out(problem.question) and problem.question not in seen:
            seen.add(problem.question)
            yield problem

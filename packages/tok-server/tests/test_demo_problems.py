"""The problem generator: right arithmetic, disjoint splits, repeatable files."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from demo_training.problem import ProblemSampler, WordProblem
from demo_training.problems import held_out, is_held_out, training_problem, write_held_out
from demo_training.templates import TEMPLATES
from hypothesis import given
from hypothesis import strategies as st

from tok_server.demo import HELD_OUT_FILE

EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (-?\d+)")
APPLY = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


@given(seed=st.integers(0, 2**63), which=st.sampled_from(TEMPLATES))
def test_problem_steps_are_correct_and_the_last_gives_the_answer(
    seed: int, which: Callable[[ProblemSampler], WordProblem]
) -> None:
    problem = which(ProblemSampler(Random(seed)))
    equations = [EQUATION.findall(step) for step in problem.steps]
    assert 2 <= len(problem.steps) <= 4
    for found in equations:
        assert len(found) == 1
        left, sign, right, result = found[0]
        assert APPLY[sign](int(left), int(right)) == int(result)
    assert int(equations[-1][0][3]) == problem.answer
    assert problem.solution.splitlines()[-1] == f"#### {problem.answer}"


@given(seed=st.integers(0, 2**63), which=st.sampled_from(TEMPLATES))
def test_problem_steps_use_only_given_or_computed_positive_numbers(
    seed: int, which: Callable[[ProblemSampler], WordProblem]
) -> None:
    problem = which(ProblemSampler(Random(seed)))
    known = {int(number) for number in re.findall(r"-?\d+", problem.question)}
    assert min(known) > 0
    for step in problem.steps:
        ((left, _, right, result),) = EQUATION.findall(step)
        assert int(left) in known
        assert int(right) in known | {2}  # "half" names no number
        assert int(result) > 0
        known.add(int(result))


@given(seed=st.integers(0, 2**63))
def test_training_problems_are_never_held_out(seed: int) -> None:
    random = Random(seed)
    assert not any(is_held_out(training_problem(random).question) for _ in range(20))


def test_held_out_problems_are_held_out_and_distinct() -> None:
    questions = [problem.question for problem in held_out(500, seed=3)]
    assert all(map(is_held_out, questions))
    assert len(set(questions)) == 500


def test_problem_generation_is_deterministic_per_seed() -> None:
    assert held_out(50, seed=7) == held_out(50, seed=7)
    assert not set(held_out(50, seed=7)) & set(held_out(50, seed=8))
    assert [training_problem(Random(1)) for _ in range(3)] == [training_problem(Random(1)) for _ in range(3)]


def test_held_out_problems_use_many_templates() -> None:
    shapes = {re.sub(r"\d+", "", problem.steps[-1]).split()[0] for problem in held_out(400)}
    assert len(shapes) > 8


def test_held_out_file_is_reproduced_by_the_generator(tmp_path: Path) -> None:
    write_held_out(tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_bytes() == HELD_OUT_FILE.read_bytes()
    entries = [json.loads(line) for line in HELD_OUT_FILE.read_text(encoding="utf-8").splitlines()]
    assert len(entries) == 200
    assert all(re.fullmatch(r"(?s).+\n#### \d+", entry["answer"]) for entry in entries)


@pytest.mark.parametrize("low", [0, 5])
def test_problem_sampler_number_range_includes_both_ends(low: int) -> None:
    draw = ProblemSampler(Random(0))
    assert {draw.number(low, low + 3) for _ in range(200)} == set(range(low, low + 4))

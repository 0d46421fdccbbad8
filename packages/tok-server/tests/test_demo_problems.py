"""The problem generator: right arithmetic, disjoint splits, repeatable files."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from demo_training.problem import EQUATION, ProblemSampler, WordProblem
from demo_training.problems import held_out, is_held_out, simple_problem, training_problem, write_held_out
from demo_training.templates import TEMPLATES, arithmetic, one_step
from hypothesis import given
from hypothesis import strategies as st

from tok_server.demo import HELD_OUT_FILE

APPLY = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


DIVISORS = st.sampled_from((1, 2, 5))


@given(seed=st.integers(0, 2**63), divisor=DIVISORS, which=st.sampled_from((*TEMPLATES, arithmetic, one_step)))
def test_problem_steps_are_correct_and_the_last_gives_the_answer(
    seed: int, divisor: int, which: Callable[[ProblemSampler], WordProblem]
) -> None:
    problem = which(ProblemSampler(Random(seed), divisor))
    equations = [EQUATION.findall(step) for step in problem.steps]
    assert (2 if which in TEMPLATES else 1) <= len(problem.steps) <= 4
    for found in equations:
        assert len(found) == 1
        left, sign, right, result = found[0]
        assert APPLY[sign](int(left), int(right)) == int(result)
    assert int(equations[-1][0][3]) == problem.answer
    assert problem.solution.splitlines()[-1] == f"#### {problem.answer}"


@given(seed=st.integers(0, 2**63), divisor=DIVISORS, which=st.sampled_from(TEMPLATES))
def test_problem_steps_use_only_given_or_computed_positive_numbers(
    seed: int, divisor: int, which: Callable[[ProblemSampler], WordProblem]
) -> None:
    problem = which(ProblemSampler(Random(seed), divisor))
    known = {int(number) for number in re.findall(r"-?\d+", problem.question)}
    assert min(known) > 0
    for step in problem.steps:
        ((left, _, right, result),) = EQUATION.findall(step)
        assert int(left) in known
        assert int(right) in known | {2}  # "half" names no number
        assert int(result) > 0
        known.add(int(result))


@given(seed=st.integers(0, 2**63), divisor=DIVISORS, which=st.sampled_from((*TEMPLATES, arithmetic, one_step)))
def test_problem_expression_has_the_value_of_the_answer(
    seed: int, divisor: int, which: Callable[[ProblemSampler], WordProblem]
) -> None:
    problem = which(ProblemSampler(Random(seed), divisor))
    assert re.fullmatch(r"[-+*/() 0-9]+", problem.expression)
    assert eval(problem.expression) == problem.answer
    sentence, _, last = problem.concluded("4711").partition("\n")
    assert "4711" in sentence
    assert last == "#### 4711"


@given(seed=st.integers(0, 2**63))
def test_problems_of_one_step_have_no_marks_of_their_patterns(seed: int) -> None:
    problem = simple_problem(Random(seed))
    assert not re.search(r"[\[\]{}|<>]|  | \.", problem.question + problem.solution)


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
    assert held_out(50, 7, simple_problem) == held_out(50, 7, simple_problem)
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

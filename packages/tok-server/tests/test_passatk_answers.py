"""pass@k: how answers are extracted, normalized and compared, and how task files are read."""

from __future__ import annotations

from pathlib import Path

import pytest
from demo_training.problems import held_out
from hypothesis import given
from hypothesis import strategies as st

from tok_server.demo import HELD_OUT_FILE
from tok_server.passatk.answers import EvalTask, FinalAnswerPattern, normalise, read_tasks


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("so\n#### 72", "72"),
        ("#### 1,250.", "1250"),
        ("#### 3.50", "3.5"),
        ("#### -4.0", "-4"),
        ("#### 5\nno:\n#### 6", "6"),
        ("#### .", "."),
        ("the answer is 72", None),
        ("#### many", None),
        ("", None),
    ],
)
def test_answer_pattern_takes_the_last_match_and_normalizes_numbers(text: str, found: str | None) -> None:
    assert FinalAnswerPattern().find(text) == found


def test_answer_pattern_may_have_no_group_or_an_optional_group() -> None:
    assert FinalAnswerPattern(r"\b[A-D]\b").find("A, no, C") == "C"
    assert FinalAnswerPattern(r"answer(?: (\d+))?").find("answer") is None


@pytest.mark.parametrize("pattern", ["(", "(a)(b)"])
def test_invalid_answer_pattern_raises_value_error(pattern: str) -> None:
    with pytest.raises(ValueError, match="--answer-pattern is"):
        FinalAnswerPattern(pattern)


@given(number=st.integers(-(10**15), 10**15))
def test_normalise_maps_all_spellings_of_an_integer_to_the_same_text(number: int) -> None:
    forms = (str(number), f"{number:,}", f"{number}.", f"{number}.0", f" {number:,}.00 ")
    assert {normalise(form) for form in forms} == {str(number)}


@pytest.mark.parametrize("text", ["blue", "nan", "Infinity", "1/2"])
def test_normalise_keeps_text_that_is_not_a_number(text: str) -> None:
    assert normalise(text) == text


def test_answer_is_right_only_if_marked_and_numerically_equal() -> None:
    pattern = FinalAnswerPattern()
    assert pattern.is_correct("#### 72.0", "72")
    assert not pattern.is_correct("#### 720", "72")
    assert not pattern.is_correct("72", "72")


def test_read_tasks_of_the_held_out_file_gives_the_generators_problems() -> None:
    tasks = read_tasks(HELD_OUT_FILE, FinalAnswerPattern())
    assert tasks == [EvalTask(one.question, str(one.answer)) for one in held_out(200)]


def test_read_tasks_handles_blank_lines_limit_and_bare_answers(tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text('{"question": "a", "answer": "1,000"}\n\n{"question": "b", "answer": "x #### 2"}\nbroken\n')
    assert read_tasks(file, FinalAnswerPattern(), limit=2) == [EvalTask("a", "1000"), EvalTask("b", "2")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("\xff", "line 2: not JSON .*utf-8"),
        ("[1]", "line 2: is '\\[1\\]'; allowed: an object"),
        ('{"question": "a"}', "line 2: answer is missing"),
        ('{"answer": "1"}', "line 2: question is missing"),
        ('{"question": 5, "answer": "1"}', "line 2: question is 5"),
        ('{"question": "a", "answer": " "}', "line 2: answer is ' '"),
    ],
)
def test_read_tasks_error_names_the_line_and_field(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_bytes(b'{"question": "a", "answer": "1"}\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(ValueError, match=f"bad.jsonl, {message}"):
        read_tasks(file, FinalAnswerPattern())


def test_read_tasks_refuses_a_file_without_problems(tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="contains no problems"):
        read_tasks(tmp_path / "none.jsonl", FinalAnswerPattern())

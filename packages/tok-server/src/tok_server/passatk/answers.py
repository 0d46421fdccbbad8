"""Read problems from JSONL in GSM8K's form, extract answers from texts, and compare two answers."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path

DEFAULT_PATTERN = r"#### (-?[0-9.,]+)"


@dataclass(frozen=True, slots=True)
class EvalTask:
    """A question, and its answer in normal form."""

    question: str
    answer: str


class FinalAnswerPattern:
    """A regular expression with at most one group that finds the answer in a text; its last match counts.

    Errors: ValueError if `pattern` is no such expression.
    """

    def __init__(self, pattern: str = DEFAULT_PATTERN) -> None:
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"--answer-pattern is {pattern!r}; allowed: regular expressions ({error})") from error
        if self._pattern.groups > 1:
            raise ValueError(f"--answer-pattern is {pattern!r}; allowed: at most one group")

    def find(self, text: str) -> str | None:
        """Return the text's answer in normal form; None if it has none."""
        matches = list(self._pattern.finditer(text))
        match_text = matches[-1].group(self._pattern.groups) if matches else None
        return (normalise(match_text) or None) if match_text else None

    def is_correct(self, text: str, answer: str) -> bool:
        """Return whether the text's answer equals `answer` (in normal form)."""
        return self.find(text) == answer


def normalise(answer: str) -> str:
    """Return the normal form of an answer.

    Numbers lose a leading $, thousands separators, a trailing point and trailing zeros. Other texts are stripped.

    >>> normalise(" 1,250.0 "), normalise("72."), normalise("blue")
    ('1250', '72', 'blue')
    """
    text = answer.strip()
    try:
        number = Decimal(text.replace(",", "").removeprefix("$").rstrip("."))
    except InvalidOperation:
        return text
    if not number.is_finite():
        return text
    return f"{number.normalize() + 0:f}"


def read_tasks(file: Path, pattern: FinalAnswerPattern, limit: int | None = None) -> list[EvalTask]:
    """Read at most `limit` problems of a JSONL file: objects with the strings "question" and "answer".

    The answer is what the pattern finds in "answer", or all of "answer" if the pattern finds nothing. Errors:
    ValueError that names file, line and field; OSError for a file that cannot be read.
    """
    tasks: list[EvalTask] = []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if limit is not None and len(tasks) >= limit:
                break
            if line.strip():
                tasks.append(_task(line, f"{file}, line {number}", pattern))
    if not tasks:
        raise ValueError(f"{file}: contains no problems")
    return tasks


def _task(data: bytes, location: str, pattern: FinalAnswerPattern) -> EvalTask:
    try:
        line = data.decode()
        entry = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{location}: not JSON ({error})") from error
    if not isinstance(entry, dict):
        raise ValueError(f"{location}: is {line.strip()[:40]!r}; allowed: an object with question and answer")
    question, answer = (_field(entry, name, location) for name in ("question", "answer"))
    return EvalTask(question, pattern.find(answer) or normalise(answer))


def _field(entry: dict[str, object], name: str, location: str) -> str:
    value = entry.get(name)
    if name not in entry:
        raise ValueError(f"{location}: {name} is missing")
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{location}: {name} is {value!r}; allowed: a string that is not empty")
    return value

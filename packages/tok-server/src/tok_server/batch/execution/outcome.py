"""Write a batch's answers in the order of its lines, each line once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tok_server.batch.execution.run import LineSource
from tok_server.batch.storage import (
    LOOK_EVERY,
    Answers,
    InputChanged,
    LineAnswer,
    Stopped,
    Unanswered,
    parse_known_line,
    read_lines,
    unanswered,
)

Take = Callable[[bytes, bool], None]
"""Called with each line in turn: its text, and whether it failed."""


def each_line(
    source: LineSource,
    answers: Answers,
    why: Unanswered | None,
    take: Take,
    stopped: Callable[[], bool] = lambda: False,
) -> int:
    """Call `take` for every line, with the error `why` for lines without an answer. Return how many have none.

    why  None: every line has an answer

    Holds one answer in memory at a time. Errors: Stopped, InputChanged.
    """
    if why is None:
        _check_complete(source, answers)
        for answer in _looking(answers.in_order(), stopped):
            take(answer.text, answer.failed)
        return 0
    return _merge(source, answers.in_order(), why, take, stopped)


def _check_complete(source: LineSource, answers: Answers) -> None:
    totals = answers.totals()
    if totals.completed + totals.failed != source.lines:
        found = totals.completed + totals.failed
        raise InputChanged(
            f"{found} of the {source.lines} lines that {source.path.name} had could be read and answered"
        )


def _merge(
    source: LineSource, answers: Iterator[LineAnswer], why: Unanswered, take: Take, stopped: Callable[[], bool]
) -> int:
    lines, missing, answer = 0, 0, next(answers, None)
    for line in read_lines(source.path, stopped=stopped):
        lines += 1
        if answer is not None and answer.line == line.row:
            take(answer.text, answer.failed)
            answer = next(answers, None)
        elif line.data is not None:
            take(unanswered(parse_known_line(source.path, line).custom_id, why), True)
            missing += 1
    if lines != source.lines or answer is not None:
        raise InputChanged(f"{source.path.name} has {lines} lines, not the {source.lines} that were validated")
    return missing


def _looking(answers: Iterator[LineAnswer], stopped: Callable[[], bool]) -> Iterator[LineAnswer]:
    for count, answer in enumerate(answers):
        if count % LOOK_EVERY == 0 and stopped():
            raise Stopped
        yield answer

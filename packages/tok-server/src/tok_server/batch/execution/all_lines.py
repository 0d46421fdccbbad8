"""Go through all lines of a batch in order: each with its answer, or with an error if it has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tok_server.batch.execution.line_runner import LineSource
from tok_server.batch.storage import (
    LINES_PER_STOP_CHECK,
    Answers,
    InputChanged,
    LineAnswer,
    Stopped,
    UnansweredReason,
    parse_known_line,
    read_lines,
    unanswered_line,
)

WriteLine = Callable[[bytes, bool], None]
"""Called with each line in turn: its text, and whether it failed."""


def for_each_line(
    source: LineSource,
    answers: Answers,
    reason: UnansweredReason | None,
    write_line: WriteLine,
    stopped: Callable[[], bool],
) -> int:
    """Call `write_line` for every line, with the error `reason` for lines without an answer. Return how many have none.

    reason  None: every line has an answer

    Holds one answer in memory at a time. Errors: Stopped, InputChanged.
    """
    if reason is None:
        _check_complete(source, answers)
        for answer in _stoppable(answers.in_order(), stopped):
            write_line(answer.text, answer.failed)
        return 0
    return _merge(source, answers.in_order(), reason, write_line, stopped)


def _check_complete(source: LineSource, answers: Answers) -> None:
    totals = answers.totals()
    if totals.completed + totals.failed != source.lines:
        answered = totals.completed + totals.failed
        raise InputChanged(
            f"only {answered} of the {source.lines} validated lines of {source.path.name} could be read and answered"
        )


def _merge(
    source: LineSource,
    answers: Iterator[LineAnswer],
    reason: UnansweredReason,
    write_line: WriteLine,
    stopped: Callable[[], bool],
) -> int:
    lines, unanswered_lines, answer = 0, 0, next(answers, None)
    for line in read_lines(source.path, stopped=stopped):
        lines += 1
        if answer is not None and answer.line == line.row:
            write_line(answer.text, answer.failed)
            answer = next(answers, None)
        elif line.data is not None:
            write_line(unanswered_line(parse_known_line(source.path, line).custom_id, reason), True)
            unanswered_lines += 1
    if lines != source.lines or answer is not None:
        raise InputChanged(f"{source.path.name} has {lines} lines, not the {source.lines} that were validated")
    return unanswered_lines


def _stoppable(answers: Iterator[LineAnswer], stopped: Callable[[], bool]) -> Iterator[LineAnswer]:
    for count, answer in enumerate(answers):
        if count % LINES_PER_STOP_CHECK == 0 and stopped():
            raise Stopped
        yield answer

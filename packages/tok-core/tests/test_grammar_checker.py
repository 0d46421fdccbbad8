"""A grammar is checked by a process that may be lost to it, once, and within limits."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from support.tiny_tokenizer import write_tokenizer
from tok_core.errors import EngineError, InvalidField, ModelError
from tok_core.grammar import Grammar
from tok_core.grammar.checker import Checker, LocalExaminer, Task, refuse
from tok_core.grammar.examiner import ProcessExaminer

GOOD = Grammar(kind="regex", value="a|b")
BAD = Grammar(kind="regex", value="(a")
HARD = Grammar(kind="json_schema", value=json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(3000)}}))
WAIT = 240


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    directory = tmp_path_factory.mktemp("checked")
    first = write_tokenizer(directory, 512)
    return Task(str(directory), 512, (first + 1, first + 2), cpu_seconds=1, memory=256 << 20)


@pytest.fixture(scope="module")
def examiner(task: Task) -> ProcessExaminer:
    return ProcessExaminer(task)


@pytest.fixture(scope="module")
def checker(examiner: ProcessExaminer) -> Iterator[Checker]:
    found = Checker(examiner)
    yield found
    found.close()
    assert examiner._process is None


def verdict(checker: Checker, grammar: Grammar) -> str:
    return checker.begin(grammar).result(WAIT)


def test_a_verdict_says_what_is_allowed_and_is_known_from_then_on(checker: Checker) -> None:
    assert verdict(checker, GOOD) == ""
    assert "not closed" in verdict(checker, BAD)
    assert checker.begin(GOOD).done()
    assert checker.begin(BAD).done()
    refuse(GOOD, verdict(checker, GOOD))
    with pytest.raises(InvalidField, match="grammar is '\\(a'; allowed: regular expressions"):
        refuse(BAD, verdict(checker, BAD))


def test_what_takes_too_long_is_refused_and_the_next_is_checked_as_ever(checker: Checker, task: Task) -> None:
    assert task.too_much == "grammars that take at most 1 s of a CPU and 256 MiB to compile"
    assert verdict(checker, HARD) == task.too_much
    assert verdict(checker, Grammar(kind="regex", value="again")) == ""
    assert checker.begin(HARD).done()  # nobody is asked a second time


def test_a_process_that_is_killed_is_replaced(examiner: ProcessExaminer, checker: Checker) -> None:
    assert verdict(checker, Grammar(kind="regex", value="before")) == ""
    process = examiner._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    lost = Grammar(kind="regex", value="lost")
    with pytest.raises(EngineError, match="has died"):
        verdict(checker, lost)
    assert verdict(checker, lost) == ""


def test_what_takes_too_much_memory_is_refused(checker: Checker, task: Task) -> None:
    widths = {f"p{n}": {"type": "string", "maxLength": n} for n in range(33, 400)}
    greedy = Grammar(kind="json_schema", value=json.dumps({"properties": widths}))
    assert verdict(checker, greedy) == task.too_much


def test_without_a_tokenizer_there_is_no_verdict(tmp_path: Path) -> None:
    checker = Checker(LocalExaminer(Task(str(tmp_path), 512, (0,))))
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        verdict(checker, GOOD)
    checker.close()
    with pytest.raises(EngineError, match="closed"):
        checker.begin(GOOD)


def test_closing_ends_what_is_being_checked_and_the_process(task: Task) -> None:
    checker = Checker(ProcessExaminer(task))
    asked = checker.begin(GOOD)
    checker.close()
    with pytest.raises((EngineError, CancelledError)):
        asked.result(WAIT)
    with pytest.raises(EngineError, match="closed"):
        checker.begin(GOOD)


class Gate:
    """Finds every grammar good, once it has been opened."""

    stoppable = True

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self.seen: list[str] = []

    def examine(self, grammar: Grammar) -> str:
        self.seen.append(grammar.value)
        self.reached.set()
        assert self.open.wait(WAIT)
        return ""

    def close(self) -> None:
        self.open.set()


def test_what_nobody_waits_for_any_more_is_not_examined_and_no_more_wait_than_may() -> None:
    gate = Gate()
    checker = Checker(gate)
    begun, waiting, left, new = (Grammar(kind="regex", value=value) for value in "abcd")
    first, again = checker.begin(begun, 3), checker.begin(begun, 3)
    assert gate.reached.wait(WAIT)
    others = [checker.begin(waiting, 3), checker.begin(left, 3)]
    with pytest.raises(EngineError, match="3 other grammars are being checked already"):
        checker.begin(new, 3)
    assert first.cancel()
    with pytest.raises(EngineError, match="already"):
        checker.begin(new, 3)  # the first is being examined all the same
    assert others[1].cancel()
    others[1] = checker.begin(new, 3)
    checker.begin(Grammar(kind="regex", value="e")).cancel()  # without `most` there is always room
    gate.open.set()
    assert [one.result(WAIT) for one in (again, *others)] == ["", "", ""]
    assert verdict(checker, left) == ""  # left once, it may be asked about again
    assert gate.seen == ["a", "b", "d", "c"]
    checker.close()


def test_two_examiners_are_asked_at_the_same_time() -> None:
    gates = Gate(), Gate()
    checker = Checker(*gates)
    asked = [checker.begin(grammar) for grammar in (GOOD, BAD)]
    assert all(gate.reached.wait(WAIT) for gate in gates)
    checker.close()
    assert [one.result(WAIT) for one in asked] == ["", ""]


def test_without_a_process_of_its_own_the_verdicts_are_the_same(task: Task) -> None:
    checker = Checker(LocalExaminer(task))
    assert verdict(checker, GOOD) == ""
    assert "not closed" in verdict(checker, BAD)
    checker.close()


def test_where_no_process_can_be_started_nobody_waits_for_ever(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tok_core.grammar.examiner.sys.executable", "/no/such/python")
    checker = Checker(ProcessExaminer(task))
    with pytest.raises(EngineError, match=r"cannot be checked: .*No such file"):
        verdict(checker, GOOD)
    checker.close()


class Stubborn(LocalExaminer):
    """Compiles until it is let go."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.begun, self.go = threading.Event(), threading.Event()

    def examine(self, grammar: Grammar) -> str:
        self.begun.set()
        assert self.go.wait(WAIT)
        raise RuntimeError("broken")


def test_what_cannot_be_stopped_is_not_waited_for_and_whatever_it_raises_is_told(task: Task) -> None:
    stubborn = Stubborn(task)
    checker = Checker(stubborn)
    asked = checker.begin(GOOD)
    assert stubborn.begun.wait(WAIT)
    checker.close()
    with pytest.raises(EngineError, match="closed"):
        asked.result(WAIT)
    stubborn.go.set()
    other = Checker(stubborn)
    with pytest.raises(EngineError, match="RuntimeError: broken"):
        verdict(other, GOOD)
    other.close()

"""Checker: each grammar is checked once, within limits, by a process that it may kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import msgspec
import pytest

from support.patience import PATIENCE, wait_until
from support.tiny_tokenizer import write_tokenizer
from tok_core.errors import EngineError, InvalidField, ModelError
from tok_core.grammar.checker import Checker, GrammarLimits, LocalExaminer, refuse
from tok_core.grammar.worker_processes import WorkerProcesses
from tok_core.grammar.worker_processes.examiner import ProcessExaminer, process_checker
from tok_core.sampling_params import Grammar

GOOD = Grammar(kind="regex", value="a|b")
BAD = Grammar(kind="regex", value="(a")
HARD = Grammar(kind="json_schema", value=json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(3000)}}))
SLOW = msgspec.structs.replace(HARD, prefix="a")
WAIT = 240


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> GrammarLimits:
    directory = tmp_path_factory.mktemp("checked")
    first = write_tokenizer(directory, 512)
    return GrammarLimits(str(directory), 512, (first + 1, first + 2), cpu_seconds=1, memory=64 << 20)


@pytest.fixture(scope="module")
def examiner(task: GrammarLimits) -> ProcessExaminer:
    return ProcessExaminer(task)


@pytest.fixture(scope="module")
def checker(examiner: ProcessExaminer) -> Iterator[Checker]:
    found = Checker(examiner)
    yield found
    found.close()
    assert examiner.processes._process is None


def verdict(checker: Checker, grammar: Grammar) -> str:
    return checker.begin(grammar).result(WAIT)


def test_verdicts_name_the_allowed_values_and_are_cached(checker: Checker) -> None:
    assert verdict(checker, GOOD) == ""
    assert "not closed" in verdict(checker, BAD)
    assert checker.begin(GOOD).done()
    assert checker.begin(BAD).done()
    refuse(GOOD, verdict(checker, GOOD))
    with pytest.raises(InvalidField, match="grammar is '\\(a'; allowed: regular expressions"):
        refuse(BAD, verdict(checker, BAD))


def test_grammar_over_the_cpu_limit_is_refused_and_the_next_one_checked(checker: Checker, task: GrammarLimits) -> None:
    assert task.too_much == "grammars that take at most 1 s of a CPU and 64 MiB to compile"
    assert verdict(checker, HARD) == task.too_much
    assert verdict(checker, Grammar(kind="regex", value="again")) == ""
    assert checker.begin(HARD).done()  # the verdict is cached


def test_killed_examiner_process_is_replaced(task: GrammarLimits) -> None:
    # With these limits, the slow grammar takes minutes: the process is killed while it compiles.
    examiner = ProcessExaminer(msgspec.structs.replace(task, cpu_seconds=WAIT, memory=16 << 30))
    checker = Checker(examiner)
    assert verdict(checker, Grammar(kind="regex", value="before")) == ""
    process = examiner.processes._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert verdict(checker, Grammar(kind="regex", value="after")) == ""
    process = examiner.processes._process
    assert process is not None
    lost = checker.begin(SLOW)
    wait_until(lambda: examiner._worker is not None)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="has died"):
        lost.result(WAIT)
    assert verdict(checker, Grammar(kind="regex", value="last")) == ""
    checker.close()


def test_worker_of_a_killed_process_is_no_verdict_though_another_runs(task: GrammarLimits) -> None:
    processes = WorkerProcesses(msgspec.structs.replace(task, cpu_seconds=WAIT, memory=16 << 30))
    worker = processes.begin(SLOW)
    assert processes._process is not None
    processes._process.kill()
    processes._process.wait()
    other = processes.begin(GOOD)
    examiner = ProcessExaminer(task, processes)
    with pytest.raises(EngineError, match="has died"):
        examiner._verdict(worker)
    assert examiner._verdict(other) == ""
    worker.close()
    other.close()
    processes.close()


def test_worker_ends_if_its_parent_died_before_the_call_to_prctl() -> None:
    """The first process forks a second, which forks a third and is killed; the third asks to end with the second."""
    script = """
import os, signal, sys
from tok_core.grammar.worker_processes.worker import end_with
dead, die = os.pipe()
parent = os.fork()
if not parent:
    second = os.getpid()
    if os.fork():
        os.kill(second, signal.SIGKILL)
    os.read(dead, 1)
    end_with(second)
    print("it lives", flush=True)
    os._exit(0)
os.waitpid(parent, 0)
os.write(die, b".")
"""
    # The output ends when the last of the three processes has ended.
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=WAIT, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_compiling_stops_when_all_callers_of_a_check_have_cancelled(task: GrammarLimits) -> None:
    """One tenant cancels six grammars that take seconds: a small one of another tenant is checked at once."""
    checker = process_checker(msgspec.structs.replace(task, cpu_seconds=5))
    left = [checker.begin(msgspec.structs.replace(SLOW, suffix="x" * n), tenant="a") for n in range(6)]
    assert verdict(checker, GOOD) == ""  # tenant "a" does not occupy all examiners
    examiners = [one for one in checker._examiners if isinstance(one, ProcessExaminer)]
    busy = [worker for one in examiners if (worker := one._worker) is not None]
    assert len(busy) <= len(examiners) - 1
    for one in left:
        assert one.cancel() or one.done()
    wait_until(lambda: all(one._worker is None for one in examiners))
    assert all(worker.stopped for worker in busy)
    again = checker.begin(SLOW)
    again.cancel()
    assert verdict(checker, Grammar(kind="regex", value="b")) == ""
    checker.close()


def test_grammar_over_the_memory_limit_is_refused(checker: Checker, task: GrammarLimits) -> None:
    widths = {f"p{n}": {"type": "string", "maxLength": n} for n in range(33, 400)}
    greedy = Grammar(kind="json_schema", value=json.dumps({"properties": widths}))
    assert verdict(checker, greedy) == task.too_much


def test_checker_without_a_tokenizer_raises_model_error(tmp_path: Path) -> None:
    checker = Checker(LocalExaminer(GrammarLimits(str(tmp_path), 512, (0,))))
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        verdict(checker, GOOD)
    checker.close()
    with pytest.raises(EngineError, match="closed"):
        checker.begin(GOOD)


def test_closing_the_checker_fails_open_checks(task: GrammarLimits) -> None:
    checker = Checker(ProcessExaminer(task))
    asked = checker.begin(GOOD)
    checker.close()
    with pytest.raises((EngineError, CancelledError)):
        asked.result(WAIT)
    with pytest.raises(EngineError, match="closed"):
        checker.begin(GOOD)


class Gate:
    """Examiner that accepts every grammar, once it has been opened."""

    stoppable = True

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self.seen: list[str] = []

    def examine(self, grammar: Grammar) -> str:
        self.seen.append(grammar.value)
        self.reached.set()
        assert self.open.wait(WAIT)
        return ""

    def stop(self) -> None:
        """Do nothing: `examine` returns when the test opens the gate."""

    def close(self) -> None:
        self.open.set()


def test_checker_skips_cancelled_checks_and_limits_open_ones() -> None:
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
        checker.begin(new, 3)  # the first check goes on for its second caller
    assert others[1].cancel()
    others[1] = checker.begin(new, 3)
    checker.begin(Grammar(kind="regex", value="e")).cancel()  # without `most`, the number of checks is not limited
    gate.open.set()
    assert [one.result(WAIT) for one in (again, *others)] == ["", "", ""]
    assert verdict(checker, left) == ""  # a cancelled grammar may be checked again
    assert gate.seen == ["a", "b", "d", "c"]
    checker.close()


def test_one_tenant_does_not_occupy_all_examiners_of_a_checker() -> None:
    gates = Gate(), Gate()
    checker = Checker(*gates)
    asked = [checker.begin(Grammar(kind="regex", value=value), 3, "a") for value in "xyz"]
    with pytest.raises(EngineError, match="3 other grammars"):
        checker.begin(GOOD, 3, "a")
    asked.append(checker.begin(GOOD, 3, "b"))  # the limit is per tenant
    assert all(gate.reached.wait(WAIT) for gate in gates)
    assert sorted(gates[0].seen + gates[1].seen) == [GOOD.value, "x"]
    for gate in gates:
        gate.open.set()
    assert [one.result(WAIT) for one in asked] == [""] * 4
    checker.close()


def test_local_examiner_gives_the_verdicts_of_a_process(task: GrammarLimits) -> None:
    checker = Checker(LocalExaminer(task))
    assert verdict(checker, GOOD) == ""
    assert "not closed" in verdict(checker, BAD)
    checker.close()


def test_check_fails_if_no_examiner_process_can_start(task: GrammarLimits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tok_core.grammar.worker_processes.processes.sys.executable", "/no/such/python")
    checker = Checker(ProcessExaminer(task))
    with pytest.raises(EngineError, match=r"cannot be checked: .*No such file"):
        verdict(checker, GOOD)
    checker.close()


class Stubborn(LocalExaminer):
    """Examiner that cannot be stopped, and fails when the test releases it."""

    def __init__(self, task: GrammarLimits) -> None:
        super().__init__(task)
        self.begun, self.go = threading.Event(), threading.Event()

    def examine(self, grammar: Grammar) -> str:
        self.begun.set()
        assert self.go.wait(WAIT)
        raise RuntimeError("broken")


def test_unstoppable_examiner_does_not_block_close_and_its_error_is_raised(task: GrammarLimits) -> None:
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


def test_grammar_compilation_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    end = write_tokenizer(tmp_path, 512) + 1
    code = f"""if True:
        import sys
        import tok_core.replicas.processes.manager_process
        from tok_core.sampling_params import Grammar
        from tok_core.grammar.local import loader

        guide = loader({str(tmp_path)!r}, 512, [{end}], None)().compile(Grammar(kind="regex", value="a+b"))
        assert guide.matcher().accept_string("aab")
        assert not {{"torch", "transformers"}} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=PATIENCE)

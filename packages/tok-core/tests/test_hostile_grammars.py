"""Expensive grammars keep the manager's turns short, let no process grow much, and delay no other request.

TOK_FUZZ multiplies the number of random grammars. Turns are measured in the manager's own CPU time, which does not
depend on other load of the machine.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from support.fuzzing import FACTOR
from support.guided import GuidedWorker
from support.patience import PATIENCE
from support.schedules import assert_all_given_back, engine_info, make_manager, submit
from support.tiny_tokenizer import write_tokenizer
from tok_core import SamplingParams
from tok_core.grammar.checker import GrammarLimits
from tok_core.grammar.worker_processes.processes import WorkerProcesses
from tok_core.runtime.garbage_collection import freeze_gc_heap
from tok_core.sampling_params import Grammar

VOCABULARY = 512
TURN_SECONDS = 0.05
GROWTH = 256 << 20
WIDE = {
    "type": "array",
    "minItems": 3,
    "items": {"anyOf": [{"type": "string", "maxLength": k} for k in range(10, 400)]},
}
AMBIGUOUS = 'x x x x x x "~~~"\nx ::= [a-z ]* | x x\n'
REPEATED = "([^\\x00]{0,1000}){0,1000}"
KNOWN = (
    Grammar(kind="json_schema", value=json.dumps(WIDE)),
    Grammar(kind="ebnf", value=f"root ::= {REPEATED}\n"),
    Grammar(kind="ebnf", value=f"root ::= {AMBIGUOUS}"),
)
SMALL = Grammar(kind="regex", value="[a-d]{400}")


def hostile(rng: random.Random) -> Grammar:
    """Return a random grammar with several constructs that multiply parser states."""
    terms = ["x x", "y{0,300}", "(x | y)*", "[a-z ]{0,200}", "(y | [^~]{0,50}){0,50}", "x*", '"a"', "(x x x)+"]
    rules = [" ".join(rng.choices(terms, k=rng.randint(1, 4))) for _ in range(3)]
    way = rng.choice(["", '"!" | [^!] '])
    return Grammar(
        kind="ebnf", value=f'root ::= {way}{rules[0]} "~~"\nx ::= [a-z ]* | {rules[1]}\ny ::= "a"? | {rules[2]}\n'
    )


class Service:
    """A manager over a simulated worker, with worker processes for grammars."""

    def __init__(self, directory: Path) -> None:
        begin = write_tokenizer(directory, VOCABULARY)
        sizes = engine_info(vocab_size=VOCABULARY, max_model_len=600, num_pages=4000, max_running=16)
        info = msgspec.structs.replace(sizes, eos_token_ids=(begin + 1,))
        self.manager, self.ports = make_manager(info)
        self.ports.worker = GuidedWorker(info)
        task = GrammarLimits(
            str(directory), VOCABULARY, (begin + 1,), cpu_seconds=1, token_seconds=0.25, sequence_seconds=0.5
        )
        self.workers = WorkerProcesses(task)
        self.manager.grammars.pool.workers = self.workers
        self.rid = 0
        self.slowest = 0.0
        self.largest = 0
        self.turns, self.sizes = [0.0], [0]  # maximum of each check

    def run(self, *grammars: Grammar | None, n: int = 1) -> dict[int, str]:
        """Run the requests; return for each its total number of tokens, or why it was refused or failed."""
        reports, first = len(self.ports.reports), self.rid
        for grammar in grammars:
            params = SamplingParams(n=n, max_tokens=300, seed=0, ignore_eos=grammar is None, grammar=grammar)
            self.ports.inbox.append(submit(self.rid, [1, 2, 3], params))
            self.rid += 1
        deadline = time.monotonic() + PATIENCE
        while not self.over():
            began = time.thread_time()
            worked = self.manager.turn()
            self.slowest = max(self.slowest, time.thread_time() - began)
            assert time.monotonic() < deadline
            if not worked:
                self.ports.wait(0)
                self.weigh()
                time.sleep(0.001)
        found: dict[int, str] = {}
        for report in self.ports.reports[reports:]:
            found |= dict(report.refused + report.failed)
            for end in report.finished:
                found[end.rid] = str(int(found.get(end.rid, "0")) + end.tokens)
        assert found.keys() == set(range(first, self.rid))
        return dict(sorted(found.items()))

    def over(self) -> bool:
        """Return whether the manager has no work left."""
        return not (self.ports.inbox or self.manager.intake.requests or self.ports.queued)

    def weigh(self) -> None:
        """Record the largest growth of a worker process beyond the process that it was forked from."""
        process = self.workers._process
        if process is None:
            return
        sizes = [resident(int(pid)) for pid in children(process.pid)]
        self.largest = max(self.largest, *(size - resident(process.pid) for size in sizes), 0)


def children(pid: int) -> list[str]:
    """Return the children of a process that has one thread."""
    try:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []


def resident(pid: int) -> int:
    """Return the resident bytes of a process, 0 once it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    found = Service(tmp_path_factory.mktemp("hostile"))
    freeze_gc_heap()  # as a manager process does; the garbage collector then skips the modules that the tests import
    assert list(found.run(SMALL, None).values()) == ["300"] * 2
    yield found
    assert_all_given_back(found.manager)
    found.manager.close()
    print(f"slowest turn {1e3 * max(found.turns):.1f} ms of a CPU, largest worker +{max(found.sizes) / 1e6:.0f} MB")


def check(service: Service, *grammars: Grammar, n: int = 1) -> list[str]:
    """Check that each grammar ends or is refused, that other requests get all tokens, and that the limits hold."""
    own = resident(os.getpid())
    service.slowest = service.largest = 0
    found = service.run(*grammars, SMALL, None, n=n)
    *others, small, free = found.values()
    assert (small, free) == (str(300 * n),) * 2
    for one in others:
        assert one.isdigit() or one.startswith("grammars "), one
    service.turns.append(service.slowest)
    service.sizes.append(service.largest)
    assert service.slowest < TURN_SECONDS
    assert service.largest < GROWTH
    assert resident(os.getpid()) - own < GROWTH
    return others


@pytest.mark.parametrize("grammar", KNOWN, ids=lambda grammar: grammar.value[:40])
def test_expensive_grammar_ends_its_request_and_delays_no_other(service: Service, grammar: Grammar) -> None:
    (one,) = check(service, grammar, n=3)
    assert one.startswith("grammars ")


def test_random_expensive_grammars_delay_no_other_request(service: Service) -> None:
    rng = random.Random(1)
    ends = [one for _ in range(2 * FACTOR) for one in check(service, *(hostile(rng) for _ in range(3)), n=2)]
    print(f"{len(ends)} grammars, {sum(one.isdigit() for one in ends)} of them followed to their end")

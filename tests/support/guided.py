"""Simulate workers whose samples follow grammars, and compute the expected samples."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import wait

import numpy as np
import xgrammar

from support.patience import wait_until
from support.schedules import EOS, VOCAB, make_manager
from support.schemas import tokens_of
from support.simulated_worker import SimulatedPorts, SimulatedWorker, next_token
from tok_core import SamplingParams
from tok_core.grammar.compiler import Compiled, Compiler
from tok_core.grammar.local import LocalWorker, LocalWorkers
from tok_core.grammar.matchers import MatcherCall, MatcherReply, Verdict
from tok_core.grammar.worker_processes.processes import WorkerLost
from tok_core.grammar.worker_processes.worker import COMPILING, IDLE
from tok_core.manager.loop import Manager
from tok_core.manager.requests import Request
from tok_core.messages import EngineInfo, StepInput, StepOutput
from tok_core.sampling_params import Grammar

LONGER = ('{"', '": ', "ab", "abc", "cd", ", ", '"}', "bcd", "ef", "efg", "gh", "01", "123")
PIECES = [*'0123456"abcdefgh{}[],: .', *LONGER]
BYTES = [*(piece.encode() for piece in PIECES[:EOS]), b"", *(piece.encode() for piece in PIECES[EOS:])]


def spell(text: str) -> list[int]:
    """Return the text as tokens, longest match first; an empty list if the tokens cannot spell it."""
    found: list[int] = []
    data = text.encode()
    while data:
        fitting = [token for token, piece in enumerate(BYTES) if piece and data.startswith(piece)]
        if not fitting:
            return []
        found.append(max(fitting, key=lambda token: len(BYTES[token])))
        data = data[len(BYTES[found[-1]]) :]
    return found


COMPILER = Compiler(BYTES, VOCAB, [EOS], spell)


class GuidedWorker(SimulatedWorker):
    """A simulated worker that samples only tokens that the masks of its steps allow."""

    def run(self, step: StepInput) -> StepOutput:
        assert len({mask.tobytes() for mask in step.bitmask}) == len(step.bitmask) == len(set(step.mask_index.tolist()))
        self.masks = dict(zip(step.sample_slot[step.mask_row].tolist(), step.bitmask[step.mask_index], strict=True))
        return super().run(step)

    def _draw(self, context: np.ndarray, slot: int) -> int:
        token = super()._draw(context, slot)
        if slot not in self.masks or self.ended[slot]:
            return token
        allowed = tokens_of(self.masks[slot])
        return allowed[next_token(context, int(self.sample[slot]), 1 << 20) % len(allowed)]


class LateWorker:
    """A grammar worker that answers late, and that tests may lose at any of the sequences it follows."""

    def __init__(self, worker: LocalWorker, workers: LateWorkers) -> None:
        self._worker = worker
        self._workers = workers
        self._said: list[Verdict | MatcherReply] = []
        self.at = COMPILING
        self.lost = self.orphaned = False

    def send(self, work: MatcherCall) -> None:
        if self.lost:
            return
        self.at = work.follow[-1].sequence if work.follow else self.at
        self._worker.send(work)

    def receive(self) -> list[Verdict | MatcherReply]:
        if self.lost:
            raise WorkerLost(self.at, orphaned=self.orphaned)
        self._said += self._worker.receive()
        if self._workers.rng.random() < 0.6:
            return []
        said, self._said = self._said, []
        self.at = IDLE if said else self.at
        return said

    def close(self) -> None:
        self._workers.all.remove(self)
        self._worker.close()


class LateWorkers(LocalWorkers):
    """Grammar workers that answer late."""

    def __init__(self, seed: int) -> None:
        super().__init__(lambda: COMPILER)
        self.rng = random.Random(seed)
        self.all: list[LateWorker] = []

    def begin(self, grammar: Grammar) -> LateWorker:  # type: ignore[override]
        worker = super().begin(grammar)
        wait([worker._future])  # else a busy machine compiles for longer than the simulated manager turns
        self.all.append(LateWorker(worker, self))
        return self.all[-1]


def guided_manager(
    info: EngineInfo,
    run_ahead: int = 2,
    *,
    pp: int = 1,
    compiler: Compiler = COMPILER,
    workers: LateWorkers | None = None,
) -> tuple[Manager, SimulatedPorts]:
    """Return a manager whose simulated worker follows masks, and its ports."""
    manager, ports = make_manager(info, run_ahead, pp=pp)
    ports.worker = GuidedWorker(info)
    manager.grammars.pool.workers = workers or LocalWorkers(lambda: compiler)
    return manager, ports


def prepare(manager: Manager, grammars: Sequence[Grammar]) -> None:
    """Wait until all grammars are compiled."""
    guides = manager.grammars
    for rid, grammar in enumerate(grammars):
        request = Request(-1 - rid, np.array([1], np.int32), SamplingParams(grammar=grammar), 0, 64)

        def admitted(request: Request = request) -> bool:
            guides.advance()
            return guides.admit(request)

        wait_until(admitted)
        guides.leave(request)


def expected_guided(prompt: Sequence[int], sample: int, params: SamplingParams) -> list[int]:
    """Return the expected tokens of a sample: chosen by a hash of the context among the allowed tokens.

    Text that the grammar forces (jump forward) is spelled as the tokenizer does.
    """
    assert params.grammar is not None
    assert params.max_tokens is not None
    guide = COMPILER.compile(params.grammar)
    matcher, context, plan = guide.matcher(), list(prompt), list[int]()
    for number in range(params.max_tokens):
        allowed = _allowed(matcher, guide)
        if not allowed:
            break
        if number and not plan and len(allowed) > 1:
            text = matcher.find_jump_forward_string()
            plan = list(guide.lead(text)) if len(text) > 1 else []
        if plan:
            token = plan.pop(0)
            assert token in allowed
        else:
            token = allowed[next_token(np.array(context), sample, 1 << 20) % len(allowed)]
        context.append(token)
        if token == EOS or token in params.stop_token_ids:
            break
        assert matcher.accept_token(token)
    return context[len(prompt) :]


def _allowed(matcher: xgrammar.GrammarMatcher, guide: Compiled) -> list[int]:
    mask = np.zeros((1, len(guide.first)), np.int32)
    matcher.fill_next_token_bitmask(mask)
    return [token for token in tokens_of(mask[0]) if token < VOCAB]


def text_of(tokens: Sequence[int]) -> str:
    """Return the text of the tokens without EOS tokens."""
    return b"".join(BYTES[token] for token in tokens).decode()

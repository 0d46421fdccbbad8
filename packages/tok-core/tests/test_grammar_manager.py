"""Guided sequences get the tokens that their grammar and context determine, whatever runs beside them."""

from __future__ import annotations

import json
import random
import threading
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise, product
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.guided import (
    BYTES,
    COMPILER,
    LateWorker,
    LateWorkers,
    expected_guided,
    guided_manager,
    prepare,
    spell,
    text_of,
)
from support.patience import PATIENCE, wait_until
from support.schedules import (
    EOS,
    VOCAB,
    assert_all_given_back,
    drive,
    engine_info,
    expected,
    submit,
)
from support.simulated_worker import SimulatedPorts, SimulatedWorker
from tok_core import SamplingParams
from tok_core.grammar.compiler import Compiled, Compiler
from tok_core.grammar.matchers import FollowRequest, Matchers
from tok_core.grammar.worker_processes.worker import IDLE
from tok_core.manager.loop import Manager
from tok_core.manager.prefix_groups import grouping
from tok_core.manager.sequences import State
from tok_core.messages import Cancel, Finished, ToManager
from tok_core.sampling_params import Grammar

SCHEMA = {
    "type": "object",
    "properties": {"ab": {"type": "integer", "minimum": 0, "maximum": 60}, "cd": {"enum": ["abc", "gh", "abcd"]}},
    "required": ["ab", "cd"],
    "additionalProperties": False,
}
GRAMMARS = (
    Grammar(kind="json_schema", value=json.dumps(SCHEMA)),
    Grammar(kind="regex", value="(abcdef|abcdefgh|0)*1"),
    Grammar(kind="choice", value='["abcdefgh", "abcdefab", "gh"]'),
    Grammar(kind="regex", value="[a-h]{3,9}"),
)


def tokens_of(ports: SimulatedPorts) -> dict[tuple[int, int], list[int]]:
    """Return the reported tokens of each request's samples."""
    found: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for report in ports.reports:
        keys = list(zip(report.rid.tolist(), report.sample.tolist(), strict=True))
        bounds = [0, *np.cumsum(report.rounds).tolist()]
        assert bounds[-1] == len(keys)
        for first, end in pairwise(bounds):
            assert len(set(keys[first:end])) == end - first
        for key, token in zip(keys, report.token.tolist(), strict=True):
            found[key].append(token)
    return dict(found)


def ends_of(ports: SimulatedPorts) -> dict[tuple[int, int], Finished]:
    return {(end.rid, end.sample): end for report in ports.reports for end in report.finished}


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    run_ahead=st.integers(1, 4),
    pp=st.sampled_from([1, 1, 2, 3]),
    pages=st.sampled_from([20, 30, 64]),
    slots=st.integers(3, 8),
    budget=st.sampled_from([8, 17, 64]),
    late=st.sampled_from([None, False, True]),
)
def test_guided_samples_have_the_tokens_of_their_grammar_and_context(
    seed: int, run_ahead: int, pp: int, pages: int, slots: int, budget: int, late: bool | None
) -> None:
    """Grammar workers answer at once, late, or late with some of them killed while idle."""
    rng = random.Random(seed)
    info = engine_info(num_pages=pages, max_running=slots, max_step_tokens=budget)
    workers = None if late is None else LateWorkers(seed)
    manager, ports = guided_manager(info, run_ahead, pp=pp, workers=workers)
    prepare(manager, GRAMMARS)
    shared = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 9))]
    prompts, params, arrivals = {}, {}, defaultdict(list)
    for rid in range(rng.randint(1, 9)):
        prompts[rid] = [*shared, *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 9)))]
        grammar = rng.choice([*GRAMMARS, None])
        params[rid] = SamplingParams(
            n=rng.randint(1, 4), max_tokens=rng.randint(1, 30), seed=0, grammar=grammar, priority=rng.randrange(2)
        )
        arrivals[rng.randrange(30)].append(submit(rid, prompts[rid], params[rid]))
    kills = 2 if late else 0

    def kill() -> bool:
        nonlocal kills
        if workers is not None and workers.all and kills and rng.random() < 0.1:
            worker = rng.choice(workers.all)
            worker.lost, worker.at, kills = True, IDLE, kills - 1
        return False

    drive(manager, ports, arrivals, until=kill)
    found, ends = tokens_of(ports), ends_of(ports)
    for rid, one in params.items():
        for sample in range(one.n):
            right = (
                expected(prompts[rid], sample, one)
                if one.grammar is None
                else expected_guided(prompts[rid], sample, one)
            )
            assert found[rid, sample] == right
            end = ends[rid, sample]
            assert end.tokens == len(right)
            assert end.reason == ("stop" if right[-1] == EOS else "length")
    assert manager.stats().output_tokens == sum(map(len, found.values()))
    assert_all_given_back(manager)
    assert not manager.table.matchers


def test_lost_grammar_worker_fails_only_the_request_it_was_following() -> None:
    for seed in range(8):
        workers = LateWorkers(seed)
        manager, ports = guided_manager(engine_info(max_running=8), workers=workers)
        prepare(manager, GRAMMARS[:1])
        params = SamplingParams(n=2, max_tokens=30, seed=0, grammar=GRAMMARS[0])
        blamed: list[int] = []

        def lose(manager: Manager = manager, workers: LateWorkers = workers, blamed: list[int] = blamed) -> bool:
            (guide,) = manager.grammars.pool.states.values()
            if not blamed and len(guide.waiting) > 2:
                worker, matcher = workers.all[0], guide.matchers[max(guide.waiting)]
                worker.lost, worker.at = True, matcher.number
                blamed.append(int(manager.table.rid[matcher.slot]))
            return False

        drive(manager, ports, {0: [submit(rid, [rid], params) for rid in range(3)]}, until=lose)
        (guilty,) = blamed
        refused = [one for report in ports.reports for one in report.refused]
        assert [rid for rid, _ in refused] == [guilty]
        assert all(allowed.startswith("grammars whose texts take less") for _, allowed in refused)
        found = tokens_of(ports)
        for rid in {0, 1, 2} - {guilty}:
            assert all(found[rid, sample] == expected_guided([rid], sample, params) for sample in range(2))
        assert_all_given_back(manager)
        manager.close()


def test_grammar_workers_lost_with_their_process_fail_no_request() -> None:
    workers = LateWorkers(seed=0)
    manager, ports = guided_manager(engine_info(max_running=8), workers=workers)
    prepare(manager, GRAMMARS[:2])
    params = [SamplingParams(n=2, max_tokens=30, seed=0, grammar=grammar) for grammar in GRAMMARS[:2]]
    lost: list[LateWorker] = []

    def lose(manager: Manager) -> bool:
        states = manager.grammars.pool.states.values()
        if not lost and all(state.waiting for state in states):
            lost.extend(workers.all)
            for worker, state in zip(lost, states, strict=True):
                worker.lost, worker.orphaned, worker.at = True, True, max(state.waiting)
        return False

    drive(manager, ports, {0: [submit(rid, [rid], params[rid % 2]) for rid in range(4)]}, until=lambda: lose(manager))
    assert len(lost) == 2
    assert not [one for report in ports.reports for one in report.refused]
    found = tokens_of(ports)
    for rid, sample in product(range(4), range(2)):
        assert found[rid, sample] == expected_guided([rid], sample, params[rid % 2])
    assert_all_given_back(manager)
    manager.close()


def test_forced_text_is_prefilled_instead_of_sampled() -> None:
    manager, ports = guided_manager(engine_info())
    grammar = Grammar(kind="choice", value='["abcdefgh01", "abcdefgh12"]')
    prepare(manager, [grammar])
    params = SamplingParams(max_tokens=20, seed=0, grammar=grammar)
    drive(manager, ports, {0: [submit(1, [1, 2, 3], params)]})
    found = tokens_of(ports)[1, 0]
    assert found == expected_guided([1, 2, 3], 0, params)
    assert text_of(found) in ("abcdefgh01", "abcdefgh12")
    assert manager.stats().skipped_tokens >= len(found) - 4
    assert manager.stats().steps < len(found)
    assert manager.stats().output_tokens == len(found)
    assert max(len(step.prefill_token) for step in ports.steps[1:]) > 1


def test_max_tokens_or_stop_token_within_forced_text_ends_the_sample() -> None:
    grammar = Grammar(kind="choice", value='["gh0123456gh"]')
    for most, stops in ((4, ()), (30, (spell("3")[0],))):
        manager, ports = guided_manager(engine_info())
        prepare(manager, [grammar])
        params = SamplingParams(max_tokens=most, stop_token_ids=stops, seed=0, grammar=grammar)
        drive(manager, ports, {0: [submit(1, [1], params)]})
        found, end = tokens_of(ports)[1, 0], ends_of(ports)[1, 0]
        assert found == expected_guided([1], 0, params)
        assert end.reason == ("stop" if stops else "length")
        assert len(found) <= most
        assert_all_given_back(manager)


def test_unguided_sequences_run_ahead_while_guided_ones_wait() -> None:
    manager, ports = guided_manager(engine_info(), 4)
    prepare(manager, GRAMMARS)
    guided = SamplingParams(max_tokens=24, seed=0, grammar=GRAMMARS[3])
    free = SamplingParams(max_tokens=24, seed=0, ignore_eos=True)
    drive(manager, ports, {0: [submit(1, [1, 2], guided), submit(2, [3, 4], free)]})
    assert tokens_of(ports)[1, 0] == expected_guided([1, 2], 0, guided)
    assert tokens_of(ports)[2, 0] == expected([3, 4], 0, free)
    assert ports.most_queued == 4
    assert manager.stats().steps == 24  # no more than the unguided sequence takes


@pytest.mark.parametrize("held", [True, False])
def test_preempted_guided_samples_continue_in_their_grammar_state(held: bool) -> None:
    manager, ports = guided_manager(engine_info(max_running=6, max_step_tokens=6))
    params = SamplingParams(n=4, max_tokens=40, seed=0, grammar=GRAMMARS[0])
    prepare(manager, GRAMMARS)
    table = manager.table

    def victims() -> list[int]:
        """Return slots that wait for a token, or that have forced text to compute."""
        state, behind = (State.DECODE, True) if held else (State.PREFILL, table.known > table.prompt_len)
        found: list[int] = ((table.state == state) & (table.held == held) & behind).nonzero()[0].tolist()
        return found

    drive(manager, ports, {0: [submit(1, [1, 2, 3, 4, 5], params)]}, until=lambda: bool(victims()))
    for _ in range(3):
        for slot in victims()[:2]:
            manager.reclaimer.preempt_for_pages(slot)
        drive(manager, ports, {0: []}, until=lambda: bool(victims()))
    drive(manager, ports, {0: []})
    assert manager.stats().preemptions >= 2
    found = tokens_of(ports)
    assert all(found[1, sample] == expected_guided([1, 2, 3, 4, 5], sample, params) for sample in range(4))
    assert_all_given_back(manager)


class Slow(Compiler):
    """Compiler that blocks until the test releases it."""

    def __init__(self) -> None:
        super().__init__(BYTES, VOCAB, [EOS], spell)
        self.go = threading.Event()

    def compile(self, grammar: Grammar) -> Compiled:
        assert self.go.wait(PATIENCE)
        return super().compile(grammar)


def test_request_with_a_compiling_grammar_does_not_block_others() -> None:
    slow = Slow()
    manager, ports = guided_manager(engine_info(), compiler=slow)
    params = SamplingParams(max_tokens=9, seed=0, grammar=GRAMMARS[0])
    free = SamplingParams(max_tokens=9, seed=0)
    messages = [submit(1, [1], params), submit(2, [2], free), submit(3, [3], params), submit(4, [4], params)]
    drive(manager, ports, {0: messages, 3: [Cancel(3)]}, until=lambda: (2, 0) in ends_of(ports))
    assert set(manager.grammars.waiting) == {1, 4}
    assert manager.stats().requests_waiting == 2
    slow.go.set()
    prepare(manager, [GRAMMARS[0]])
    drive(manager, ports, {0: []})
    assert tokens_of(ports).keys() == {(1, 0), (2, 0), (4, 0)}
    assert tokens_of(ports)[1, 0] == expected_guided([1], 0, params)
    assert not manager.grammars.waiting
    assert_all_given_back(manager)


def test_request_waiting_for_its_grammar_keeps_its_queue_position() -> None:
    manager, ports = guided_manager(engine_info(max_running=1))
    params = SamplingParams(max_tokens=3, seed=0, grammar=GRAMMARS[3])
    free = SamplingParams(max_tokens=30, seed=0, ignore_eos=True)
    manager.intake.submit(submit(1, [1], free))
    manager.intake.submit(submit(2, [1], params))  # not compiled yet
    manager.intake.submit(submit(3, [1], free))
    prepare(manager, [GRAMMARS[3]])
    drive(manager, ports, {0: []})
    order = [rid for report in ports.reports for rid in dict.fromkeys(report.rid.tolist())]
    assert list(dict.fromkeys(order)) == [1, 2, 3]


def test_sample_is_cut_where_the_vocabulary_cannot_follow_the_grammar() -> None:
    manager, ports = guided_manager(engine_info())
    grammar = Grammar(kind="choice", value='["abéa"]')  # no token has the é
    prepare(manager, [grammar])
    drive(manager, ports, {0: [submit(1, [1], SamplingParams(max_tokens=9, seed=0, grammar=grammar))]})
    assert text_of(tokens_of(ports)[1, 0]) == "ab"
    assert ends_of(ports)[1, 0].reason == "length"
    assert_all_given_back(manager)


def test_worker_that_ignores_masks_does_not_affect_other_requests() -> None:
    manager, ports = guided_manager(engine_info())
    prepare(manager, GRAMMARS)
    ports.worker = SimulatedWorker(manager.scheduler.info)  # ignores masks
    params = SamplingParams(n=4, max_tokens=9, seed=0, grammar=GRAMMARS[0])
    drive(manager, ports, {0: [submit(1, [1], params), submit(2, [1], SamplingParams(max_tokens=4, seed=0))]})
    assert {end.reason for key, end in ends_of(ports).items() if key[0] == 1} <= {"length", "stop"}
    assert tokens_of(ports)[2, 0] == expected([1], 0, SamplingParams(max_tokens=4, seed=0))
    assert_all_given_back(manager)


def test_masks_allow_exactly_the_tokens_that_the_grammar_accepts() -> None:
    rng = random.Random(3)
    for grammar in GRAMMARS:
        guide = COMPILER.compile(grammar)
        for _ in range(6):
            matcher, text = guide.matcher(), b""
            for _ in range(12):
                mask = np.zeros((1, 2), np.int32)
                matcher.fill_next_token_bitmask(mask)
                allowed = set(np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist())
                assert allowed == {token for token in range(VOCAB) if _accepts(guide, text, token)}
                going = sorted(allowed - {EOS})
                if not going:
                    break
                token = rng.choice(going)
                assert matcher.accept_token(token)
                text += BYTES[token]


def _accepts(guide: Compiled, text: bytes, token: int) -> bool:
    """Return whether the token may follow the text, by a new matcher that has only accepted the text."""
    if token != EOS and (token >= len(BYTES) or not BYTES[token]):
        return False
    matcher = guide.matcher()
    assert matcher.accept_string(text)
    if token == EOS:
        return bool(matcher.accept_token(EOS))
    return bool(matcher.accept_string(BYTES[token]))


@pytest.mark.parametrize("state", [State.PREFILL, State.DECODE])
def test_cancelled_guided_request_frees_its_slots_and_matchers(state: int) -> None:
    manager, ports = guided_manager(engine_info(max_step_tokens=4))
    prepare(manager, GRAMMARS)
    params = SamplingParams(n=3, max_tokens=30, seed=0, grammar=GRAMMARS[0])
    arrivals = {0: [submit(1, [1] * 9, params)]}
    drive(manager, ports, arrivals, until=lambda: bool((manager.table.state == state).any()))
    assert manager.intake.requests
    drive(manager, ports, {0: [Cancel(1)]})
    assert_all_given_back(manager)
    assert not manager.table.matchers


class Broken(Compiler):
    """Compiler that fails for grammars with a z."""

    def __init__(self) -> None:
        super().__init__(BYTES, VOCAB, [EOS], spell)

    def compile(self, grammar: Grammar) -> Compiled:
        if "z" in grammar.value:
            raise RuntimeError("no z")
        return super().compile(grammar)


def test_grammar_that_fails_to_compile_fails_only_its_requests() -> None:
    manager, ports = guided_manager(engine_info(), compiler=Broken())
    bad = SamplingParams(max_tokens=9, seed=0, grammar=Grammar(kind="regex", value="z"))
    good = SamplingParams(max_tokens=9, seed=0, grammar=GRAMMARS[0])
    failed = set[int]()

    def told() -> bool:
        failed.update(rid for report in ports.reports for rid, reason in report.failed if "no z" in reason)
        return len(failed) == 2 and not manager.grammars.waiting

    drive_waiting(manager, ports, [submit(1, [1], bad), submit(2, [2], good), submit(3, [3], bad)], told)
    drive(manager, ports, {0: []})
    assert failed == {1, 3}
    assert tokens_of(ports) == {(2, 0): expected_guided([2], 0, good)}
    assert_all_given_back(manager)
    manager.close()


def drive_waiting(
    manager: Manager, ports: SimulatedPorts, messages: list[ToManager], until: Callable[[], bool]
) -> None:
    """Run turns of the manager, while threads compile, until `until()` is true."""
    ports.inbox += messages

    def holds() -> bool:
        manager.turn()
        return until()

    wait_until(holds)


def test_grammars_are_dropped_when_cancelled_and_kept_once_compiled() -> None:
    slow = Slow()
    manager, ports = guided_manager(engine_info(), compiler=slow)
    asked = [SamplingParams(max_tokens=9, seed=0, grammar=grammar) for grammar in GRAMMARS[:3]]
    for rid, params in enumerate(asked):
        manager.intake.submit(submit(rid, [1], params))
    assert len(manager.grammars.pool.states) == 3
    drive(manager, ports, {0: [Cancel(rid) for rid in range(3)]})
    assert not manager.grammars.pool.states
    assert_all_given_back(manager)
    slow.go.set()
    prepare(manager, GRAMMARS[:1])
    drive(manager, ports, {0: [submit(4, [1], asked[0])]})
    assert tokens_of(ports)[4, 0] == expected_guided([1], 0, asked[0])
    (guide,) = manager.grammars.pool.states.values()
    assert (guide.requests, guide.matchers) == ({}, {})
    manager.close()
    assert not manager.grammars.pool.states


def test_prefix_groups_are_not_recomputed_while_guided_sequences_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, ports = guided_manager(engine_info(num_pages=300, max_running=20))
    grammar = Grammar(kind="regex", value="[a-h]{40}")
    prepare(manager, [grammar])
    guided = SamplingParams(n=6, max_tokens=30, seed=0, grammar=grammar)
    free = SamplingParams(n=6, max_tokens=30, seed=0, ignore_eos=True)
    found = Mock(wraps=grouping.MostPagesSaved.choose)
    monkeypatch.setattr(grouping.MostPagesSaved, "choose", lambda *arguments: found(*arguments))
    prompts = {1: [1, 2, 3] * 4, 2: [1, 2, 3] * 4 + [4]}
    drive(manager, ports, {0: [submit(1, prompts[1], guided), submit(2, prompts[2], free)]})
    tokens = tokens_of(ports)
    for sample in range(6):
        assert tokens[1, sample] == expected_guided(prompts[1], sample, guided)
        assert tokens[2, sample] == expected(prompts[2], sample, free)
    assert found.call_count < 6  # only while the sequences start
    assert manager.scheduler.group_rows > 6 * 30


def test_single_forced_token_is_decoded_and_several_share_one_report() -> None:
    short, long = Grammar(kind="regex", value="([abc]0){8}"), Grammar(kind="regex", value="([abc]0123456){3}")
    for grammar, skips in ((short, False), (long, True)):
        manager, ports = guided_manager(engine_info())
        prepare(manager, [grammar])
        params = SamplingParams(max_tokens=40, seed=0, grammar=grammar)
        drive(manager, ports, {0: [submit(1, [1, 2, 3], params)]})
        assert tokens_of(ports)[1, 0] == expected_guided([1, 2, 3], 0, params)
        assert any(len(step.prefill_slot) for step in ports.steps[1:]) == skips
        reports = [report for report in ports.reports if len(report.rid)]
        assert len(reports) == len(ports.steps)
        assert any(len(report.rounds) > 1 for report in reports[:-1]) == skips


def test_preempted_guided_sequence_resumes_with_its_parked_matcher() -> None:
    manager, ports = guided_manager(engine_info())
    prepare(manager, GRAMMARS)
    params = SamplingParams(max_tokens=40, seed=0, grammar=GRAMMARS[0])
    table = manager.table
    drive(manager, ports, {0: [submit(1, [1, 2], params)]}, until=lambda: bool((table.known > 4).any()))
    (matcher,) = table.matchers.values()
    manager.reclaimer.preempt_for_pages(int(table.in_state(State.DECODE)[0]))
    drive(
        manager, ports, {0: []}, until=lambda: bool(table.matchers) and not manager.intake.requests[1].parked_matchers
    )
    assert list(table.matchers.values()) == [matcher]
    drive(manager, ports, {0: []})
    assert tokens_of(ports)[1, 0] == expected_guided([1, 2], 0, params)
    assert_all_given_back(manager)


@pytest.mark.parametrize("token", [VOCAB - 1, VOCAB, 1 << 30])
def test_drafted_tokens_without_text_are_refused_silently(token: int, capfd: pytest.CaptureFixture[str]) -> None:
    matchers = Matchers(COMPILER.compile(Grammar(kind="regex", value="[abc]{4,9}")))
    (a,), (b,) = spell("a"), spell("b")
    found = matchers.follow(FollowRequest(1, [a], 8, [b, token, b]))
    assert (len(found.drafted), found.failed) == (1, "")
    assert capfd.readouterr() == ("", "")

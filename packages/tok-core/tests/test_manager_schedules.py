"""Under any arrivals, cancellations and preemption, samples read their own context and nothing leaks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from support.schedules import (
    EOS,
    assert_all_given_back,
    drive,
    ends,
    engine_info,
    expected,
    make_manager,
    propose_expected,
    submit,
    watch_preemptions,
)
from support.simulated_worker import collect
from tok_core import SamplingParams
from tok_core.config import Speculate
from tok_core.manager.sequences import State
from tok_core.messages import Cancel, EngineInfo, StepInput, StepOutput, ToManager


@dataclass
class Arrival:
    """One request, the turn it comes at, and how many turns later it is cancelled, if at all."""

    turn: int
    prompt: list[int]
    params: SamplingParams
    cancelled: int | None
    salt: bytes


@dataclass
class Scenario:
    """Sizes and settings of an engine, and its requests."""

    info: EngineInfo
    arrivals: list[Arrival]
    run_ahead: int
    groups: bool
    pp: int
    speculate: Speculate
    accuracy: float
    model_accuracy: float | None  # None: there is no draft model


@st.composite
def scenarios(draw: st.DrawFn, *, drafts_on_device: bool = False) -> Scenario:
    page_size = draw(st.sampled_from([1, 2, 4, 8, 16]))
    max_running = draw(st.integers(1, 8))
    max_len = draw(st.integers(8, 64))
    stem = draw(st.lists(st.integers(0, 3), max_size=40))
    aligned = draw(st.booleans())  # prompts whose length is a multiple of the page size, or one off
    arrivals = []
    for _ in range(draw(st.integers(1, 12))):
        shared = stem[: draw(st.integers(0, len(stem)))]
        prompt = shared + draw(st.lists(st.integers(0, 3), min_size=1, max_size=20))
        if aligned:
            wanted = max(1, len(prompt) // page_size * page_size + draw(st.integers(-1, 1)))
            prompt = [*prompt, 1][:wanted]
        prompt = prompt[: max_len - 1]
        params = SamplingParams(
            n=draw(st.sampled_from([1, 1, 2, 2, 5, 5, 17, 40])),
            max_tokens=draw(st.integers(1, max_len - len(prompt))),
            min_tokens=draw(st.sampled_from([0, 0, 1])),
            ignore_eos=draw(st.booleans()),
            stop_token_ids=draw(st.sampled_from([(), (), (3, 9), (5, EOS)])),  # unknown to the worker
            seed=1,
            priority=draw(st.sampled_from([0, 0, 0, -1, 5])),
        )
        cancelled = draw(st.one_of(st.none(), st.none(), st.integers(0, 120)))
        salt = draw(st.sampled_from([b"", b"", 16 * b"a", 16 * b"b"]))
        arrivals.append(Arrival(draw(st.integers(0, 30)), prompt, params, cancelled, salt))
    info = engine_info(
        drafts_on_device=drafts_on_device,
        max_model_len=max_len,
        num_pages=-(-max_len // page_size) * draw(st.integers(1, 4)),
        page_size=page_size,
        max_running=max_running,
        max_step_tokens=max_running + draw(st.integers(0, 40)),
    )
    pp = 1 if drafts_on_device else draw(st.sampled_from([1, 1, 2, 3, 4]))
    run_ahead = draw(st.integers(1, 4 if pp == 1 else 2 * pp))
    drafts: list[Speculate] = ["off", 1, 3, 8, "auto"]
    speculate = draw(st.sampled_from(drafts[drafts_on_device:]))
    accuracies = [0.0, 0.7, 0.95, 1.0]
    accuracy = draw(st.sampled_from(accuracies))
    model_accuracy = draw(st.sampled_from([None, *accuracies]))
    if speculate != "off" and model_accuracy is not None and not drafts_on_device:
        draft_len = draw(st.sampled_from([max_len, max_len // 2]))
        info = structs.replace(info, draft_len=draft_len, draft_share=draw(st.sampled_from([0.001, 0.1])))
    return Scenario(info, arrivals, run_ahead, draw(st.booleans()), pp, speculate, accuracy, model_accuracy)


def test_prompt_continuing_past_a_cached_eos_reads_only_computed_pages() -> None:
    manager, ports = make_manager(engine_info(max_running=64, num_pages=1000, page_size=4))
    params = SamplingParams(n=64, max_tokens=50, seed=1)
    drive(manager, ports, {0: [submit(0, [1, 2, 3], params)]})
    tokens, _ = collect(ports.reports)
    prompts = [[1, 2, 3, *tokens[0, sample]] for sample in range(64)]
    aligned = [prompt for prompt in prompts if prompt[-1] == EOS and len(prompt) % 4 == 0]
    assert len(aligned) >= 5
    further = SamplingParams(max_tokens=5, seed=1)
    drive(manager, ports, {0: [submit(rid, [*prompt, 9], further) for rid, prompt in enumerate(aligned, 1)]})
    tokens, _ = collect(ports.reports)
    for rid, prompt in enumerate(aligned, 1):
        assert tokens[rid, 0] == expected([*prompt, 9], 0, further)


def test_draft_row_whose_logits_are_not_finite_is_computed_again() -> None:
    manager, ports = make_manager(engine_info(max_running=16), groups=False, speculate=3)
    propose_expected(manager, accuracy=1)
    run, broken = ports.worker.run, list[int]()

    def run_broken(step: StepInput) -> StepOutput:
        output = run(step)
        if len(step.decode_slot) > 1 and step.step % 2:
            output.logprob[-1] = np.nan  # draft rows come last
            broken.append(step.step)
        return output

    setattr(ports.worker, "run", run_broken)  # noqa: B010
    prompt, params = [1, 2, 3], SamplingParams(max_tokens=40, seed=1, ignore_eos=True)
    drive(manager, ports, {0: [submit(0, prompt, params)]})
    tokens, _ = collect(ports.reports)
    assert tokens[0, 0] == expected(prompt, 0, params)
    assert len(broken) > 3


@pytest.mark.parametrize("run_ahead", [1, 2, 4, 7])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("ignore_eos", [True, False])
def test_sequences_preempted_with_drafts_in_flight_get_right_tokens(
    run_ahead: int, page_size: int, ignore_eos: bool
) -> None:
    info = engine_info(
        drafts_on_device=True, max_running=24, max_step_tokens=48, page_size=page_size, num_pages=160 // page_size
    )
    manager, ports = make_manager(info, run_ahead, speculate=4, admission="watermark")
    table, turns, preempted = manager.table, count(), list[int]()

    def preempt_some() -> bool:
        drafting = [slot for slot in table.in_state(State.DECODE).tolist() if table.ahead[slot] > 0]
        if drafting and next(turns) % 5 == 0:
            preempted.append(drafting[0])
            manager.reclaimer.preempt_for_slots(drafting[:1])
        return False

    params = SamplingParams(n=3, max_tokens=50, seed=1, ignore_eos=ignore_eos)
    prompts = [[1, 2, 3], [4] * 10, [5, 6] * 4, [7]]
    arrivals = {3 * rid: [submit(rid, prompt, params)] for rid, prompt in enumerate(prompts)}
    drive(manager, ports, arrivals, preempt_some)
    tokens, _ = collect(ports.reports)
    for rid, prompt in enumerate(prompts):
        for sample in range(params.n):
            assert tokens[rid, sample] == expected(prompt, sample, params)
    assert len(preempted) > 3
    assert manager.stats().accepted_tokens > 100
    assert_all_given_back(manager)


@pytest.mark.parametrize(("accuracy", "least", "most"), [(1.0, 0.99, 1.0), (0.8, 0.3, 0.95), (0.0, 0.0, 0.0)])
def test_draft_model_drafts_what_the_index_cannot_predict(accuracy: float, least: float, most: float) -> None:
    info = engine_info(max_running=32, num_pages=256, draft_len=64, draft_share=0.001)
    manager, ports = make_manager(info, speculate=4)
    ports.worker.draft_accuracy = accuracy
    prompts, params = [[1, 2, 3], [4] * 30], SamplingParams(n=3, max_tokens=30, seed=1, ignore_eos=True)
    drive(manager, ports, {0: [submit(rid, prompt, params) for rid, prompt in enumerate(prompts)]})
    tokens, _ = collect(ports.reports)
    for rid, prompt in enumerate(prompts):
        for sample in range(params.n):
            assert tokens[rid, sample] == expected(prompt, sample, params)
    stats = manager.stats()
    assert stats.model_drafted_tokens > 0
    assert least <= stats.model_accepted_tokens / stats.model_drafted_tokens <= most
    assert (manager.scheduler.steps < 30) == (accuracy > 0)


def test_draft_model_reads_a_shared_prompt_once() -> None:
    info = engine_info(max_running=64, num_pages=512, draft_len=64, draft_share=0.001)
    manager, ports = make_manager(info, speculate=2)
    prompt, params = [5] * 41, SamplingParams(n=8, max_tokens=9, seed=1, ignore_eos=True)
    drive(manager, ports, {0: [submit(0, prompt, params)]})
    drive(manager, ports, {0: [submit(1, prompt, params)]})
    assert manager.stats().model_accepted_tokens > 0
    assert 40 <= sum(len(step.drafts.chunk_token) for step in ports.steps if step.drafts is not None) < 2 * 40


def test_draft_model_reads_a_long_prompt_in_several_steps() -> None:
    info = engine_info(max_running=8, num_pages=256, max_step_tokens=16, draft_len=64, draft_share=0.001)
    manager, ports = make_manager(info, speculate=2)
    params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
    drive(manager, ports, {0: [submit(0, [5] * 41, params)]})
    chunks = [len(step.drafts.chunk_token) for step in ports.steps if step.drafts is not None]
    assert max(chunks) == 16
    assert sum(chunks) > 41
    assert manager.stats().model_accepted_tokens > 0


@settings(max_examples=30)
@given(scenarios())
def test_random_schedules_give_right_tokens_and_free_all_resources(scenario: Scenario) -> None:
    check_answers(scenario)


@settings(max_examples=30)
@given(scenarios(drafts_on_device=True))
def test_random_schedules_of_device_drafts_give_right_tokens(scenario: Scenario) -> None:
    check_answers(scenario)


def check_answers(scenario: Scenario) -> None:
    """Check that a scenario gives the right tokens and frees all resources."""
    manager, ports = make_manager(
        scenario.info, scenario.run_ahead, groups=scenario.groups, pp=scenario.pp, speculate=scenario.speculate
    )
    if scenario.speculate != "off" and not scenario.info.drafts_on_device:
        propose_expected(manager, scenario.accuracy)
    accuracy = scenario.accuracy if scenario.info.drafts_on_device else scenario.model_accuracy
    ports.worker.draft_accuracy = accuracy or 0.0
    watch_preemptions(manager)
    messages: dict[int, list[ToManager]] = {}
    for rid, one in enumerate(scenario.arrivals):
        messages.setdefault(one.turn, []).append(submit(rid, one.prompt, one.params, salt=one.salt))
    for rid, one in enumerate(scenario.arrivals):
        if one.cancelled is not None:
            messages.setdefault(one.turn + one.cancelled, []).append(Cancel(rid))
    drive(manager, ports, messages)
    tokens, ended = collect(ports.reports)
    for rid, one in enumerate(scenario.arrivals):
        for sample in range(one.params.n):
            got, wanted = tokens.get((rid, sample), []), expected(one.prompt, sample, one.params)
            assert got == wanted[: len(got)]
            if one.cancelled is None:
                assert got == wanted
                assert ended[rid, sample].reason == ("stop" if ends(got, one.params) else "length")
    assert_all_given_back(manager)

"""Samples without a slot when their prompt is prefilled start later as decode rows and prefill nothing."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from support.schedules import assert_all_given_back, drive, engine_info, expected, kept, make_manager, submit
from support.simulated_worker import collect
from tok_core import SamplingParams
from tok_core.manager.admission.forecast_admission import ForecastAdmission
from tok_core.manager.kv_cache.retained_prompts import RetainedPrompt
from tok_core.manager.requests import Pending, Request
from tok_core.messages import EMPTY, Cancel, Progress, StepInput

PROMPT = [i * 7 % 4 for i in range(40)]


def prefilled(steps: list[StepInput]) -> int:
    return int(sum(step.prefill_count.sum() for step in steps))


def assert_as_expected(reports: list[Progress], rid: int, prompt: list[int], params: SamplingParams) -> None:
    tokens, _ = collect(reports)
    for sample in range(params.n):
        assert tokens[rid, sample] == expected(prompt, sample, params)


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 15, 16, 17, 32, 33])
def test_only_the_first_sample_prefills_the_prompt(page_size: int, length: int) -> None:
    manager, ports = make_manager(engine_info(page_size=page_size, num_pages=400 // page_size))
    params = SamplingParams(n=21, max_tokens=9, seed=1)
    drive(manager, ports, {0: [submit(0, PROMPT[:length], params)]})
    assert prefilled(ports.steps) == length
    assert [len(step.prefill_slot) for step in ports.steps] == [1] + [0] * (len(ports.steps) - 1)
    assert_as_expected(ports.reports, 0, PROMPT[:length], params)
    assert_all_given_back(manager)


def test_late_samples_join_the_prefix_group_of_their_prompt_at_once() -> None:
    manager, ports = make_manager(engine_info())
    params = SamplingParams(n=20, max_tokens=6, ignore_eos=True, seed=1)
    drive(manager, ports, {0: [submit(0, PROMPT[:18], params)]})
    decoding = [step for step in ports.steps if len(step.decode_slot) > 1]
    assert sum(step.new is not None for step in decoding) >= 4
    for step in decoding:
        (level,) = step.levels
        assert level.count.tolist() == [len(step.decode_slot)]
        assert level.kv_end.tolist() == [16]


def test_samples_admitted_during_prefill_wait_for_the_shared_prompt() -> None:
    manager, ports = make_manager(engine_info(max_running=3, max_step_tokens=5))
    short, many = SamplingParams(max_tokens=2, ignore_eos=True, seed=1), SamplingParams(n=9, max_tokens=5, seed=1)
    drive(manager, ports, {0: [submit(0, PROMPT[:3], short), submit(1, PROMPT[5:], many)]})
    assert prefilled(ports.steps) == 3 + len(PROMPT[5:])
    assert_as_expected(ports.reports, 1, PROMPT[5:], many)


def test_retained_prompts_count_as_used_until_last_start_or_cancel() -> None:
    manager, ports = make_manager(engine_info(max_running=1), run_ahead=1)
    params = SamplingParams(n=3, max_tokens=4, ignore_eos=True, seed=1)
    ports.inbox += [submit(0, PROMPT[:10], params), submit(1, PROMPT[20:30], params)]
    manager.turn()
    assert manager.paging.used == 3 + 1  # two full pages and one partly full, which was copied
    admission = manager.scheduler.admission
    assert isinstance(admission, ForecastAdmission)
    capacity = admission._capacity(freed=0)
    assert capacity == 64 - 2 - 1  # shared, the copy
    drive(manager, ports, {}, until=lambda: not kept(manager))
    assert manager.paging.used == 3
    drive(manager, ports, {}, until=lambda: bool(kept(manager)))
    assert manager.paging.used == 3 + 1
    drive(manager, ports, {0: [Cancel(1)]})
    assert_all_given_back(manager)


def test_full_memory_evicts_retained_prompts_before_preempting() -> None:
    # Two samples share two pages and grow to two of their own; then the page retained for the third is needed.
    manager, ports = make_manager(engine_info(max_running=2, num_pages=6))
    params = SamplingParams(n=3, max_tokens=6, ignore_eos=True, seed=1)
    ports.inbox.append(submit(0, PROMPT[:10], params))
    drive(manager, ports, {}, until=lambda: bool(kept(manager)))
    drive(manager, ports, {}, until=lambda: not kept(manager))
    assert manager.reclaimer.preemptions == 0
    assert manager.scheduler.starter.waiting
    drive(manager, ports, {})
    assert manager.reclaimer.preemptions == 0
    assert prefilled(ports.steps) == 10 + 2  # the third finds two full pages in the cache
    assert_as_expected(ports.reports, 0, PROMPT[:10], params)


def test_requeued_sample_on_an_idle_engine_takes_retained_pages() -> None:
    manager, ports = make_manager(engine_info(max_running=1, num_pages=6), run_ahead=1)
    params = SamplingParams(n=2, max_tokens=1, seed=1)
    ports.inbox.append(submit(5, PROMPT[:9], params))
    manager.turn()
    older = Request(3, np.array(PROMPT[10:31], np.int32), SamplingParams(max_tokens=3, seed=1), 0, 64)
    manager.intake.requests[3] = older
    manager.scheduler.waiting.put_back(Pending(older, deque([0]), older.prompt))  # needs every page
    while manager.intake.requests:
        assert manager.turn(), "the manager waits although nothing is under way"
    assert_as_expected(ports.reports, 3, PROMPT[10:31], older.params)
    assert_as_expected(ports.reports, 5, PROMPT[:9], params)
    assert_all_given_back(manager)


def test_idle_engine_evicts_the_youngest_retained_prompt_for_pages() -> None:
    manager, ports = make_manager(engine_info(max_running=1, num_pages=6), run_ahead=1)
    scheduler, paging = manager.scheduler, manager.paging
    ports.inbox.append(submit(5, PROMPT[:9], SamplingParams(n=2, max_tokens=1, seed=1)))
    manager.turn()
    manager.output_processor.take(ports.outputs()[0])
    manager.reclaimer.settle()
    younger = Request(6, np.array(PROMPT[9:12], np.int32), SamplingParams(seed=1), 2, 64)
    rest = paging.allocator.allocate(paging.available)
    paging.tree.lock(paging.tree.root)
    scheduler.retained_prompts._retained[6] = RetainedPrompt(younger, paging.tree.root.id, EMPTY, rest, EMPTY, 1)
    scheduler.retained_prompts.tails += len(rest)
    step = scheduler.next_step()
    assert step is not None
    assert len(step.decode_slot) == 1
    assert not kept(manager)
    assert paging.used == 3


def test_new_slots_carry_last_prompt_token_and_first_eos_position() -> None:
    manager, ports = make_manager(engine_info(max_running=4))
    ends_late = SamplingParams(n=3, max_tokens=8, min_tokens=5, seed=1)
    never_ends = SamplingParams(max_tokens=8, ignore_eos=True, seed=1)
    drive(manager, ports, {0: [submit(0, [1, 2, 3], ends_late), submit(1, [5, 9], never_ends)]})
    new = [step.new for step in ports.steps if step.new is not None]
    assert [one.last_token.tolist() for one in new] == [[3, 3, 3, 9]]
    assert [one.eos_from_position.tolist() for one in new] == [[8, 8, 8, 2**31 - 1]]

"""Pipeline microbatches are balanced, have their tokens back in time, and do not delay a lone sequence."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from support.schedules import drive, engine_info, expected, make_manager, propose_expected, submit
from support.simulated_worker import SimulatedPorts, collect
from tok_core import SamplingParams
from tok_core.config import MAX_STEPS_AHEAD
from tok_core.manager.loop import Manager
from tok_core.manager.scheduling.steps_in_flight import (
    MAX_EXCESS_SHARE,
    MIN_QUEUED_STEPS,
    MIN_SPARE_ROWS,
    MIN_STEP_TOKENS,
    ROW_CONTEXT_TOKENS,
    Microbatches,
    RunAhead,
    TokenBudget,
)
from tok_core.manager.sequences import SequenceTable, State
from tok_core.manager.speculation.ngram_index import NO_TOKEN
from tok_core.messages import Int32, Int64
from tok_core.worker.step_tensors import has_draft_rows

FOR_EVER = SamplingParams(max_tokens=200, ignore_eos=True, seed=1)


def decoding(rows: int, stages: int, seed: int) -> Microbatches:
    """Return microbatches of `rows` sequences of all lengths, assigned at random."""
    rng = np.random.default_rng(seed)
    table = SequenceTable(rows + 3, 8192, 16)
    table.state[:rows] = State.DECODE
    table.length[:rows] = rng.integers(1, rng.choice([50, 8000]), rows)
    table.order[:rows] = rng.permutation(rows)
    microbatches = Microbatches(table, stages)
    table.microbatch[:rows] = np.minimum(rng.integers(0, microbatches.count, rows), rng.integers(0, microbatches.count))
    return microbatches


@given(st.integers(1, 700), st.integers(2, 6), st.integers(0, 1 << 20))
def test_balanced_microbatches_cost_about_the_same(rows: int, stages: int, seed: int) -> None:
    microbatches = decoding(rows, stages, seed)
    for _ in range(8 * microbatches.count):
        microbatches.balance()
        microbatches.next_turn()
    table = microbatches._table
    cost = 1 + table.length[:rows] / ROW_CONTEXT_TOKENS
    load = np.bincount(table.microbatch[:rows], cost)
    wanted = stages + 1 if rows >= MIN_SPARE_ROWS * (stages + 1) else min(stages, -(-rows // microbatches.fewest))
    assert np.count_nonzero(load) <= wanted
    assert load.max() <= cost.sum() / wanted * (1 + MAX_EXCESS_SHARE) + 2 * cost.max()


def test_overfull_microbatch_moves_its_youngest_sequences_by_one_turn() -> None:
    microbatches = decoding(100, 2, 0)
    table = microbatches._table
    table.microbatch[:100] = 0
    table.length[:100] = 1
    microbatches.balance()
    stay = microbatches.rows()
    assert table.order[stay].max() < 50 <= len(stay) + 1
    microbatches.next_turn()
    assert set(microbatches.rows()) == set(range(100)) - set(stay)


def test_next_step_decodes_the_next_microbatch_that_has_sequences() -> None:
    microbatches = decoding(6, 3, 0)
    table = microbatches._table
    table.microbatch[:6] = [1, 1, 3, 1, 3, 3]
    table.held[3] = True
    for turn, upcoming in enumerate(([0, 1, 3], [0, 1, 3], [2, 4, 5], [2, 4, 5])):
        assert microbatches.turn == turn
        assert microbatches.upcoming().tolist() == upcoming
        microbatches.next_turn()
    table.state[:] = State.FREE
    assert not len(microbatches.upcoming())


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_lone_sequence_runs_a_step_per_token_with_few_queued(pp: int) -> None:
    manager, ports = make_manager(engine_info(max_model_len=256, num_pages=256), MIN_QUEUED_STEPS, pp=pp)
    manager.run_ahead = RunAhead(None, pp)
    drive(manager, ports, {0: [submit(0, [1, 2, 3], FOR_EVER)]})
    assert len(ports.steps) == 200
    assert all(step.sampled_upto == step.step - 1 for step in ports.steps[1:])
    assert ports.most_queued <= MIN_QUEUED_STEPS


@pytest.mark.parametrize("pp", [2, 3, 6])
def test_microbatch_decodes_again_once_its_tokens_passed_all_stages(pp: int) -> None:
    rows = MIN_SPARE_ROWS * (pp + 1)
    sizes = {"max_running": rows, "num_pages": rows * 60, "max_model_len": 256}
    manager, ports = make_manager(engine_info(**sizes, max_step_tokens=rows), pp + 2, pp=pp)
    requests = [submit(rid, [1 + rid % 7, rid // 7 % 11, rid % 5], FOR_EVER) for rid in range(rows)]
    drive(manager, ports, {0: requests}, lambda: manager.scheduler.steps == 20 * (pp + 1))
    steady = ports.steps[-10 * (pp + 1) :]
    assert {step.step - step.sampled_upto for step in steady} == {pp + 1}
    even = rows / (pp + 1)
    assert all(abs(len(step.decode_slot) - even) <= even * MAX_EXCESS_SHARE + 2 for step in steady)


def drafting(pp: int, requests: int, params: SamplingParams) -> tuple[Manager, SimulatedPorts, int]:
    """Run requests of one sample with right drafts; return the most steps with drafts that were in flight together."""
    manager, ports = make_manager(engine_info(max_running=64, num_pages=512), pp + 2, pp=pp, groups=False, speculate=3)
    propose_expected(manager, accuracy=1)
    most, prompts = 0, [[1, 2, 3 + rid] for rid in range(requests)]

    def look() -> bool:
        nonlocal most
        queued = {output.step for output in ports.queued}
        most = max(most, sum(step.step in queued and has_draft_rows(step) for step in ports.steps))
        return False

    drive(manager, ports, {0: [submit(rid, prompt, params) for rid, prompt in enumerate(prompts)]}, look)
    tokens, _ = collect(ports.reports)
    assert [tokens[rid, 0] for rid in range(requests)] == [expected(prompt, 0, params) for prompt in prompts]
    return manager, ports, most


@pytest.mark.parametrize("pp", [2, 3, 4])
def test_drafts_of_several_microbatches_are_in_flight_together(pp: int) -> None:
    manager, ports, most = drafting(pp, 4 * pp, SamplingParams(max_tokens=60, ignore_eos=True, seed=1))
    assert most == pp
    assert manager.stats().accepted_tokens > 60 * pp
    waits = [step.sampled_upto > step.step - pp for step in ports.steps[5 * pp :] if has_draft_rows(step)]
    assert np.mean(waits) < 0.2, "the first stage waits for tokens of another microbatch"


def test_drafts_of_a_lone_sequence_in_a_pipeline_save_steps() -> None:
    manager, ports, most = drafting(2, 1, SamplingParams(max_tokens=60, ignore_eos=True, seed=1))
    assert most == 1
    assert len(ports.steps) == 60 - manager.stats().accepted_tokens < 50


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 6])
def test_every_microbatch_considers_drafts_while_none_pay(pp: int) -> None:
    rows = MIN_SPARE_ROWS * (pp + 1)
    sizes = {"max_running": rows + 8, "num_pages": rows * 60, "max_model_len": 256, "max_step_tokens": rows}
    manager, ports = make_manager(engine_info(**sizes), pp + 2, pp=pp, groups=False, speculate=3)
    considered = set[int]()

    def propose(slots: Int64, count: int) -> tuple[Int32, NDArray[np.float64]]:
        if manager.scheduler.steps > 20:
            considered.update(manager.table.microbatch[slots].tolist())
        return np.full((len(slots), count), NO_TOKEN, np.int32), np.zeros((len(slots), count))

    setattr(manager.speculator, "propose", propose)  # noqa: B010
    requests = [submit(rid, [1 + rid % 7, rid // 7 % 11, rid % 5], FOR_EVER) for rid in range(rows)]
    drive(manager, ports, {0: requests}, lambda: manager.scheduler.steps == 40 * (pp + 1))
    assert considered == set(range(manager.scheduler.microbatches.count))


def test_run_ahead_queues_no_step_behind_one_whose_values_it_needs() -> None:
    for fixed, stages, steps in ((None, 1, 1), (3, 1, 1), (None, 4, 5), (3, 4, 3)):
        ahead = RunAhead(fixed, stages)
        ahead.waits = True
        assert (ahead.depth, ahead.steps) == (1, steps)


def test_run_ahead_queues_one_more_step_per_pipeline_stage() -> None:
    assert RunAhead(None, 4).steps == MIN_QUEUED_STEPS + 4
    assert RunAhead(None, 4).depth == RunAhead(None, 1).steps == RunAhead(None).depth == MIN_QUEUED_STEPS
    assert RunAhead(3, 4).steps == RunAhead(3, 4).depth == 3
    assert RunAhead(None, 64).steps == MAX_STEPS_AHEAD


def test_token_budget_grows_while_prompts_wait_and_shrinks_otherwise() -> None:
    token_budget = TokenBudget(4096, 3)
    bounds = [token_budget.tokens]
    for exhausted in [False] * 60 + [True] * 60:
        token_budget.observe(exhausted=exhausted)
        bounds.append(token_budget.tokens)
    assert bounds[0] == bounds[-1] == 4096
    assert min(bounds) == MIN_STEP_TOKENS
    ratios = np.array(bounds[1:]) / np.array(bounds[:-1])
    assert ratios.max() < 1.2
    assert ratios.min() > 0.8


def test_token_budget_is_constant_without_a_pipeline() -> None:
    token_budget = TokenBudget(4096, 1)
    for exhausted in (False, False, True, False):
        token_budget.observe(exhausted=exhausted)
        assert token_budget.tokens == 4096


def test_long_prompt_is_prefilled_in_chunks_over_several_microbatches() -> None:
    sizes = {"max_running": 64, "num_pages": 2000, "max_model_len": 2000}
    manager, ports = make_manager(engine_info(**sizes, max_step_tokens=2048), 4, pp=2)
    few = [submit(rid, [1, 2, rid], FOR_EVER) for rid in range(30)]
    drive(manager, ports, {0: few}, lambda: manager.scheduler.steps == 80)
    begun = len(ports.steps)
    ports.inbox.append(submit(99, [rid % 50 for rid in range(1500)], FOR_EVER))
    drive(manager, ports, {}, lambda: manager.scheduler.steps == 100)
    chunks = [len(step.prefill_token) for step in ports.steps[begun:] if len(step.prefill_token)]
    assert sum(chunks) == 1500
    assert 3 <= len(chunks) <= 6

"""Prompt log-probabilities and embeddings are right despite caching, chunking, preemption and replica deaths."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.replicas import replica_of, simulated_core
from support.schedules import assert_all_given_back, drive, engine_info, expected, make_manager, submit
from support.simulated_worker import SimulatedPorts, collect, hidden, score
from tok_core import Pooling, SamplingParams
from tok_core.manager.sequences import State
from tok_core.messages import Cancel, EngineInfo, ToManager


@dataclass
class Arrival:
    """One request, the turn it comes at, and how many turns later it is cancelled, if at all."""

    turn: int
    prompt: list[int]
    params: SamplingParams
    pooling: Pooling | None
    cancelled: int | None


@dataclass
class Scenario:
    """Sizes of an engine, and its requests."""

    info: EngineInfo
    arrivals: list[Arrival]
    run_ahead: int
    pp: int


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    page_size, max_len = draw(st.sampled_from([1, 4, 16])), draw(st.integers(8, 64))
    max_running = draw(st.integers(1, 6))
    stem = draw(st.lists(st.integers(0, 3), max_size=40))
    arrivals = []
    for _ in range(draw(st.integers(1, 8))):
        shared = stem[: draw(st.integers(0, len(stem)))]
        prompt = (shared + draw(st.lists(st.integers(0, 3), min_size=1, max_size=20)))[:max_len]
        poolings: list[Pooling | None] = [None, None, "last", "mean"]
        pooling = draw(st.sampled_from(poolings))
        most = 0 if pooling else max_len - len(prompt)
        params = SamplingParams(
            n=1 if pooling else draw(st.sampled_from([1, 1, 2, 7])),
            max_tokens=draw(st.sampled_from([0, most, most])),
            prompt_logprobs=None if pooling else draw(st.sampled_from([None, 0, 0, 3])),
            ignore_eos=draw(st.booleans()),
            seed=1,
        )
        cancelled = draw(st.one_of(st.none(), st.none(), st.integers(0, 60)))
        arrivals.append(Arrival(draw(st.integers(0, 20)), prompt, params, pooling, cancelled))
    info = engine_info(
        max_model_len=max_len,
        num_pages=-(-max_len // page_size) * draw(st.integers(1, 3)),
        page_size=page_size,
        max_running=max_running,
        max_step_tokens=max_running + draw(st.integers(0, 24)),
    )
    return Scenario(info, arrivals, draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2])))


def told(ports: SimulatedPorts, sizes: list[int]) -> tuple[dict[int, dict[int, float]], dict[int, np.ndarray]]:
    """Return log-probabilities by request and position, and embeddings by request.

    Values that come twice, of a prompt that was begun again, must be equal; `sizes` are the prompt lengths.
    """
    scores: dict[int, dict[int, float]] = {}
    vectors: dict[int, np.ndarray] = {}
    for report in ports.reports:
        for one in report.scores:
            found = dict(enumerate(one.logprob.tolist(), one.first))
            earlier = scores.setdefault(one.rid, {})
            assert all(earlier.get(position, value) == value for position, value in found.items())
            earlier |= found
        for embedded in report.embedded:
            assert embedded.rid not in vectors
            vectors[embedded.rid] = embedded.vector
        for rid in [*report.rid.tolist(), *(end.rid for end in report.finished)]:
            scores.setdefault(rid, {})  # all values of its prompt have come by now
            assert len(scores[rid]) in (0, sizes[rid] - 1)
    return scores, vectors


@settings(max_examples=60)
@given(scenario=scenarios())
def test_prompt_logprobs_cover_every_token_and_embeddings_are_whole(scenario: Scenario) -> None:
    manager, ports = make_manager(scenario.info, scenario.run_ahead, pp=scenario.pp)
    messages: dict[int, list[ToManager]] = {}
    for rid, one in enumerate(scenario.arrivals):
        message = msgspec.structs.replace(submit(rid, one.prompt, one.params), pooling=one.pooling)
        messages.setdefault(one.turn, []).append(message)
        if one.cancelled is not None:
            messages.setdefault(one.turn + one.cancelled, []).append(Cancel(rid))
    drive(manager, ports, messages)
    tokens, finished = collect(ports.reports)
    scores, vectors = told(ports, [len(one.prompt) for one in scenario.arrivals])
    for rid, one in enumerate(scenario.arrivals):
        prompt, ended = np.array(one.prompt), all((rid, sample) in finished for sample in range(one.params.n))
        assert ended or one.cancelled is not None
        if not ended:
            continue
        wanted = {at: score(prompt[:at], one.prompt[at]) for at in range(1, len(prompt))}
        assert scores.get(rid, {}) == (wanted if one.params.prompt_logprobs is not None else {})
        states = [hidden(prompt[: at + 1]) for at in range(len(prompt))]
        match one.pooling:
            case "last":
                np.testing.assert_array_equal(vectors[rid], states[-1])
            case "mean":
                np.testing.assert_array_equal(vectors[rid], sum(states) / np.float32(len(states)))
            case None:
                assert rid not in vectors
        for sample in range(one.params.n):
            assert tokens.get((rid, sample), []) == expected(one.prompt, sample, one.params)
            assert finished[rid, sample].tokens == len(tokens.get((rid, sample), []))
    assert_all_given_back(manager)
    assert manager.stats().output_tokens == sum(map(len, tokens.values()))


@pytest.mark.parametrize("pooling", [None, "last", "mean"])
@pytest.mark.parametrize("computed", [8, 24])
def test_preempted_prompt_gives_the_same_logprobs_and_embedding(pooling: Pooling | None, computed: int) -> None:
    manager, ports = make_manager(engine_info(max_step_tokens=8), run_ahead=3)
    prompt = np.arange(37) % 5
    params = SamplingParams(max_tokens=0, seed=1, prompt_logprobs=None if pooling else 0)
    request = msgspec.structs.replace(submit(0, prompt.tolist(), params), pooling=pooling)
    drive(manager, ports, {0: [request]}, until=lambda: bool(manager.table.length.max() >= computed))
    (slot,) = manager.table.in_state(State.PREFILL).tolist()
    manager.reclaimer.preempt_for_pages(slot)
    drive(manager, ports, {})
    assert manager.stats().preemptions == 1
    scores, vectors = told(ports, [len(prompt)])
    states = [hidden(prompt[: at + 1]) for at in range(len(prompt))]
    if pooling is None:
        assert scores[0] == {at: score(prompt[:at], int(prompt[at])) for at in range(1, len(prompt))}
    else:
        wanted = states[-1] if pooling == "last" else sum(states) / np.float32(len(states))
        np.testing.assert_array_equal(vectors[0], wanted)
    assert_all_given_back(manager)


def test_prompts_of_a_dead_replica_are_recomputed_by_another() -> None:
    core = simulated_core(engine_info(max_step_tokens=8), dp=2)
    for number in range(2):
        replica_of(core, number).be_ready()
    prompt = [at % 5 for at in range(37)]
    nothing = SamplingParams(max_tokens=0, seed=1)
    embedded = core.embed(prompt, nothing, "mean", lambda requests: None, core.check(prompt, nothing))
    params = SamplingParams(n=2, max_tokens=3, seed=1, ignore_eos=True, prompt_logprobs=0)
    scored = core.submit(prompt, params, None, lambda requests: None, stream=True)
    first = {request.rid: request.parts[0].replica for request in (embedded, scored)}
    for number in range(2):
        for _ in range(4):
            replica_of(core, number).turn()
    dead = first[embedded.rid]
    assert not embedded.ended()
    replica_of(core, dead).die("it was told to")
    assert embedded.parts[0].replica != dead
    replica_of(core, 1 - dead).settle()
    states = [hidden(np.array(prompt[: at + 1])) for at in range(len(prompt))]
    output = embedded.embedding(normalize=False, dimensions=None)
    np.testing.assert_array_equal(output.embedding, sum(states) / np.float32(len(states)))
    deltas = scored.take()
    assert [delta.finish_reason for delta in deltas].count("length") == 2
    wanted = [score(np.array(prompt[:at]), prompt[at]) for at in range(1, len(prompt))]
    begun = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
    assert [[one.logprob for one in found if one is not None] for found in begun] == [wanted, wanted]
    core.close()


@pytest.mark.parametrize("cached", [20, 37])
def test_prompt_logprobs_of_a_cached_prompt_copy_only_its_last_page(cached: int) -> None:
    manager, ports = make_manager(engine_info(max_running=6), run_ahead=2)
    prompt = (np.arange(37) % 5).tolist()
    before = SamplingParams(max_tokens=1, seed=1)
    params = SamplingParams(n=5, max_tokens=4, seed=1, ignore_eos=True, prompt_logprobs=0)
    drive(manager, ports, {0: [submit(0, prompt[:cached], before)]})
    drive(manager, ports, {0: [submit(1, prompt, params)]})
    assert sum(len(step.copy_dst) for step in ports.steps) <= 5 + 1  # samples, and the page retained for late ones
    computed = sum(int(step.prefill_count.sum()) for step in ports.steps)
    assert computed <= cached + len(prompt) + (len(prompt) - cached // 4 * 4 if cached < 37 else 0)
    tokens, _ = collect(ports.reports)
    assert all(tokens[1, sample] == expected(prompt, sample, params) for sample in range(5))
    assert told(ports, [cached, 37])[0][1] == {at: score(np.array(prompt[:at]), prompt[at]) for at in range(1, 37)}
    assert_all_given_back(manager)

"""Whatever arrives when, is cancelled or preempted: every sequence reads exactly its own context, and nothing leaks."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from support.simulated_worker import SimulatedPorts, collect, next_token
from tok_core import EngineConfig, SamplingParams
from tok_core.manager.loop import Manager
from tok_core.messages import Cancel, EngineInfo, Submit

VOCAB = 50
EOS = 7


def expected(prompt: list[int], sample: int, params: SamplingParams) -> list[int]:
    """What the sample must be, token by token from its whole context."""
    context = list(prompt)
    assert params.max_tokens is not None
    for _ in range(params.max_tokens):
        context.append(next_token(np.array(context), sample, VOCAB))
        if context[-1] == EOS and not params.ignore_eos:
            break
    return context[len(prompt) :]


@st.composite
def scenarios(draw: st.DrawFn) -> dict[str, object]:
    page_size = draw(st.sampled_from([1, 2, 4, 16]))
    max_running = draw(st.integers(1, 8))
    max_len = draw(st.integers(8, 64))
    most_pages = -(-max_len // page_size) * draw(st.integers(1, 4))
    stem = draw(st.lists(st.integers(0, 3), max_size=40))
    requests = []
    for _ in range(draw(st.integers(1, 12))):
        shared = stem[: draw(st.integers(0, len(stem)))]
        prompt = (shared + draw(st.lists(st.integers(0, 3), min_size=1, max_size=20)))[: max_len - 1]
        params = SamplingParams(
            n=draw(st.sampled_from([1, 1, 2, 5])),
            max_tokens=draw(st.integers(1, max_len - len(prompt))),
            ignore_eos=draw(st.booleans()),
            seed=1,
        )
        cancelled = draw(st.one_of(st.none(), st.none(), st.integers(0, 40)))
        requests.append((draw(st.integers(0, 30)), prompt, params, cancelled))
    return {
        "info": EngineInfo(
            vocab_size=VOCAB,
            eos_token_ids=(EOS,),
            max_model_len=max_len,
            num_pages=most_pages,
            page_size=page_size,
            max_running=max_running,
            max_step_tokens=max_running + draw(st.integers(0, 40)),
            device="cpu",
            dtype="float32",
            backend="simulated",
        ),
        "requests": requests,
        "run_ahead": draw(st.integers(1, 4)),
        "groups": draw(st.booleans()),
    }


@given(scenarios())
def test_every_sample_follows_from_its_own_context_and_all_is_given_back(scenario: dict[str, object]) -> None:
    info = scenario["info"]
    assert isinstance(info, EngineInfo)
    run_ahead = scenario["run_ahead"]
    assert isinstance(run_ahead, int)
    config = EngineConfig(model="simulated", run_ahead=run_ahead, prefix_groups=bool(scenario["groups"]))
    ports = SimulatedPorts(info, delay=run_ahead - 1)
    manager = Manager(config, info, ports, None)
    requests = scenario["requests"]
    assert isinstance(requests, list)
    for turn in range(20_000):
        for rid, (arrival, prompt, params, cancelled) in enumerate(requests):
            if arrival == turn:
                ports.inbox.append(Submit(rid, np.array(prompt, np.int32), params))
            if cancelled is not None and arrival + cancelled == turn:
                ports.inbox.append(Cancel(rid))
        worked = manager.turn()
        check(manager)
        if not worked:
            if turn > 80 and not manager.requests and not ports.queued:
                break
            ports.wait(0)
    else:
        raise AssertionError("the manager did not come to an end")
    tokens, ends = collect(ports.reports)
    for rid, (_, prompt, params, cancelled) in enumerate(requests):
        for sample in range(params.n):
            got, wanted = tokens.get((rid, sample), []), expected(prompt, sample, params)
            assert got == wanted[: len(got)]
            if cancelled is None:
                assert got == wanted
                reason = "stop" if got[-1] == EOS and not params.ignore_eos else "length"
                assert ends[rid, sample].reason == reason
    assert manager.paging.used == 0
    assert manager.table.free_slots == info.max_running
    assert manager.paging.allocator.free + manager.paging.tree.pages == info.num_pages
    assert manager.paging.tree.evictable == manager.paging.tree.pages


def check(manager: Manager) -> None:
    """Every page is free, the tree's, or one slot's own; never two of these."""
    table, paging = manager.table, manager.paging
    own = [
        page
        for slot in np.flatnonzero(table.num_pages)
        for page in table.pages[slot, table.num_shared[slot] : table.num_pages[slot]].tolist()
    ]
    assert len(set(own)) == len(own)
    assert len(own) + paging.tree.pages + paging.allocator.free == paging.num_pages
    paging.tree.check()

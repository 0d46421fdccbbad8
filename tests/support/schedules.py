"""Run managers over simulated workers, compute expected samples, and check invariants on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from support.grouping import group_eagerly
from support.prefix_trees import check_tree
from support.simulated_worker import SimulatedPorts, next_token
from tok_core import EngineConfig, SamplingParams
from tok_core.config import AdmissionName, Speculate
from tok_core.manager.kv_cache.retained_prompts import RetainedPrompt
from tok_core.manager.loop import Manager
from tok_core.manager.sequences import State
from tok_core.manager.speculation.ngram_index import NO_TOKEN
from tok_core.messages import EngineInfo, Int32, Int64, Submit, ToManager

VOCAB = 50
EOS = 7


SMALL = EngineInfo(
    vocab_size=VOCAB,
    eos_token_ids=(EOS,),
    max_model_len=64,
    num_pages=64,
    page_size=4,
    max_running=4,
    max_step_tokens=64,
    device="cpu",
    dtype="float32",
    backend="simulated",
)


def engine_info(**sizes: float) -> EngineInfo:
    """Return the info of a small engine with the given sizes."""
    return msgspec.structs.replace(SMALL, **sizes)


def make_manager(
    info: EngineInfo,
    run_ahead: int = 2,
    *,
    groups: bool = True,
    pp: int = 1,
    clock: Callable[[], float] = lambda: 0.0,
    speculate: Speculate = "off",
    admission: AdmissionName = "forecast",
) -> tuple[Manager, SimulatedPorts]:
    """Return a manager and the ports of its simulated worker, or pipeline of `pp` stages.

    The manager groups even short prompts, and shares even few pages at once. While `clock` stands still, no request
    waits for too long.
    """
    ports = SimulatedPorts(info, delay=run_ahead - 1)
    config = EngineConfig(
        model="simulated", run_ahead=run_ahead, prefix_groups=groups, pp=pp, speculate=speculate, admission=admission
    )
    manager = Manager(config, info, ports, None, clock)
    manager.scheduler.microbatches.fewest = 1
    manager.paging.min_shared_entries = 8
    group_eagerly(manager)
    return manager, ports


def submit(rid: int, prompt: Sequence[int], params: SamplingParams, tenant: str = "", salt: bytes = b"") -> Submit:
    """Return a request for a simulated model."""
    return Submit(rid, np.array(prompt, np.int32), params, tenant=tenant, salt=salt)


def expected(prompt: Sequence[int], sample: int, params: SamplingParams) -> list[int]:
    """Return the expected tokens of a sample, each computed from its whole context."""
    context = list(prompt)
    assert params.max_tokens is not None
    for _ in range(params.max_tokens):
        context.append(next_token(np.array(context), sample, VOCAB))
        if ends(context[len(prompt) :], params):
            break
    return context[len(prompt) :]


def ends(generated: Sequence[int], params: SamplingParams) -> bool:
    """Return whether the last token ends its sample."""
    ending = generated[-1] in params.stop_token_ids or (generated[-1] == EOS and not params.ignore_eos)
    return ending and len(generated) > params.min_tokens


def drive(
    manager: Manager,
    ports: SimulatedPorts,
    arrivals: Mapping[int, Sequence[ToManager]],
    until: Callable[[], bool] = lambda: False,
) -> None:
    """Run turns of the manager until it is idle or `until` holds; `arrivals` come at the beginning of their turn."""
    for turn in range(20_000):
        ports.inbox += arrivals.get(turn, ())
        worked = manager.turn()
        check(manager)
        if until():
            return
        if not worked:
            if turn > max(arrivals, default=0) and not manager.intake.requests and not ports.queued:
                return
            ports.wait(0)
    raise AssertionError("the manager did not come to an end")


def watch_preemptions(manager: Manager) -> list[tuple[int, int]]:
    """Check every preemption from now on, and return the growing list of preempted (request, sample) pairs.

    A victim must be of the lowest priority class. A sample may be preempted again only if every younger running
    sample of its class has been preempted, too.
    """
    reclaimer, table = manager.reclaimer, manager.table
    preempt, victims = reclaimer.preempt_for_pages, list[tuple[int, int]]()

    def checked(slot: int) -> None:
        running = np.flatnonzero((table.state == State.PREFILL) | (table.state == State.DECODE))
        assert slot in running
        assert table.priority[slot] == table.priority[running].max()
        same = running[(table.priority[running] == table.priority[slot]) & (table.order[running] > table.order[slot])]
        younger = [(int(table.rid[one]), int(table.sample[one])) for one in same]
        victim = int(table.rid[slot]), int(table.sample[slot])
        assert victim not in victims or set(younger) <= set(victims)
        victims.append(victim)
        preempt(slot)

    setattr(reclaimer, "preempt_for_pages", checked)  # noqa: B010
    return victims


def propose_expected(manager: Manager, accuracy: float, seed: int = 0) -> None:
    """Draft the tokens that the simulated worker will sample; each is right with probability `accuracy`.

    Some calls propose nothing. Drafts have random lengths, and continue with right tokens after a wrong one.
    """
    assert manager.speculator is not None
    table, rng = manager.table, np.random.default_rng(seed)

    def propose(slots: Int64, count: int) -> tuple[Int32, NDArray[np.float64]]:
        drafts = np.full((len(slots), count), NO_TOKEN, np.int32)
        certain = np.ones(drafts.shape)
        if rng.random() < 0.3:
            return drafts, certain
        for draft, slot in zip(drafts, slots.tolist(), strict=True):
            context = table.tokens[slot, : table.known[slot]].tolist()
            for i in range(rng.integers(0, count + 1)):
                draft[i] = next_token(np.array(context), int(table.sample[slot]), VOCAB)
                context.append(draft[i])
                if rng.random() >= accuracy:
                    draft[i] = (draft[i] + 1) % VOCAB
        return drafts, certain

    setattr(manager.speculator, "propose", propose)  # noqa: B010


def kept(manager: Manager) -> list[RetainedPrompt]:
    """Return the retained prompts of samples that have not started."""
    return list(manager.scheduler.retained_prompts._retained.values())


def check(manager: Manager) -> None:
    """Check that every page is exactly one of: free, in the tree, owned by a slot, retained for late samples.

    Slots whose requests have different salts must not share a page.
    """
    table, paging, retained_prompts = manager.table, manager.paging, kept(manager)
    salts: dict[int, bytes] = {}
    for slot in np.flatnonzero(table.num_pages).tolist():
        request, salt = table.requests[slot], table.salt[slot]
        assert request is None or request.salt == salt
        for page in table.pages[slot, : table.num_pages[slot]].tolist():
            assert salts.setdefault(page, salt) == salt
    tails = [page for retained in retained_prompts for page in retained.tail.tolist()]
    own = [
        page
        for slot in np.flatnonzero(table.num_pages)
        for page in table.pages[slot, table.num_shared[slot] : table.num_pages[slot]].tolist()
    ]
    assert len(set(own + tails)) == len(own + tails)
    assert len(own + tails) + paging.tree.pages + paging.allocator.free == paging.num_pages
    assert manager.scheduler.retained_prompts.tails == len(tails)
    for retained in retained_prompts:
        assert retained.request.unsampled > 0
        assert (
            paging.tree.node(retained.node).depth
            == len(retained.pages)
            == (len(retained.request.prompt) - 1) // table.page_size
        )
    assert table.requests_running == len(set(table.rid[np.isin(table.state, (State.FREE, State.ENDED), invert=True)]))
    assert table.ended == np.count_nonzero(table.state == State.ENDED)
    check_tree(paging.tree)
    check_accounts(manager)


def check_accounts(manager: Manager) -> None:
    """Check that each account counts the samples that hold a slot or will fork from a prefilling one."""
    table, held = manager.table, Counter[int]()
    for request in {id(one): one for one in table.requests if one is not None}.values():
        forks = 0 if request.leader is None else len(manager.scheduler.starter.pending_forks.get(request.leader, ()))
        assert request.running == len(request.slots) + forks
        held[request.account.id] += request.running
        accounts = manager.scheduler.fair_shares.accounts.of_class(request.params.priority)
        assert request.account in accounts or request.rid not in manager.intake.requests
    for account in {request.account for request in manager.intake.requests.values()}:
        assert account.running == held[account.id]
        assert account.holders == sum(bool(manager.intake.requests[rid].running) for rid in account.open)


def assert_all_given_back(manager: Manager) -> None:
    """Check that the manager holds nothing once all requests have ended."""
    table, paging = manager.table, manager.paging
    assert paging.used == 0
    assert table.lendable_slots == table.slots
    assert paging.allocator.free + paging.tree.pages == paging.num_pages
    assert paging.tree.evictable == paging.tree.pages
    assert not manager.scheduler.waiting
    assert not manager.scheduler.starter.pending_forks
    assert not kept(manager)

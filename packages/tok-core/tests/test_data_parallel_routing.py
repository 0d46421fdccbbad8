"""Routing: a request goes to a replica that caches its prefix, or to the least loaded one if that is overloaded."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tok_core import SamplingParams
from tok_core.messages import Finished
from tok_core.replicas.prefix_affinity import PrefixAffinity
from tok_core.replicas.replica_load import OutputLengths, ReplicaLoad
from tok_core.replicas.router import (
    LOAD_PER_CACHED_TOKEN,
    MAX_LOAD_RATIO,
    MIN_SPLIT_SAMPLES,
    Assignment,
    Router,
    split_samples,
)

PAGE = 16
ROOM = 1000
FIXED = SamplingParams(max_tokens=100, ignore_eos=True)


def tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, count).astype(np.int32)


def place(router: Router, rid: int, prompt: np.ndarray, params: SamplingParams = FIXED) -> list[Assignment]:
    ready = range(len(router.loads))
    return router.assign(router.routing_request(rid, prompt, params, ROOM), range(params.n), ready, split=True)


def replicas(shares: list[Assignment]) -> list[int]:
    return [share.replica for share in shares]


def test_router_balances_requests_without_common_prefixes_by_load() -> None:
    router = Router(3, PAGE)
    for rid in range(300):
        params = SamplingParams(max_tokens=random.Random(rid).randint(1, 500), ignore_eos=True)
        place(router, rid, tokens(40, seed=rid), params)
    loads = [outstanding.tokens for outstanding in router.loads]
    assert max(loads) - min(loads) <= 540


def test_router_breaks_ties_by_the_least_recently_used_replica() -> None:
    router = Router(3, PAGE)
    found = []
    for rid in range(6):
        (share,) = place(router, rid, tokens(5, seed=rid))
        found.append(share.replica)
        router.remove(share.replica, rid)
    assert sorted(found[:3]) == [0, 1, 2]
    assert found[:3] == found[3:]


def test_router_follows_a_cached_prefix_until_the_replica_is_overloaded() -> None:
    router = Router(2, PAGE)
    first = place(router, 0, tokens(400))
    assert replicas(place(router, 1, tokens(400))) == replicas(first)
    rid = 2
    while replicas(place(router, rid, tokens(400))) == replicas(first):
        rid += 1
    full, other = router.loads[first[0].replica].tokens, router.loads[1 - first[0].replica].tokens
    most = LOAD_PER_CACHED_TOKEN * 384  # 384 of the 400 prompt tokens are a known prefix
    assert full - 500 <= MAX_LOAD_RATIO * (full - 500) / 2 + most
    assert full > MAX_LOAD_RATIO * full / 2 + most
    assert other == 500
    # Now both replicas cache the prompt, and the other one has less load.
    assert replicas(place(router, rid + 1, tokens(400))) != replicas(first)


def test_router_prefers_the_replica_with_the_longest_cached_prefix() -> None:
    router = Router(2, PAGE)
    short = place(router, 0, tokens(64))[0].replica
    longer = np.concatenate([tokens(64), tokens(448, seed=1)])
    router.assign(router.routing_request(1, longer, FIXED, ROOM), range(1), [1 - short], split=False)
    assert router.loads[1 - short].tokens > router.loads[short].tokens
    assert replicas(place(router, 2, longer)) == [1 - short]


def test_prefix_affinity_ignores_prefixes_with_another_cache_salt() -> None:
    affinity, prompt = PrefixAffinity(PAGE), tokens(64)
    affinity.add(affinity.prefixes(prompt, b"one"), 3)
    assert next(affinity.find(affinity.prefixes(prompt, b"one"), range(4)), None) == (64, [3])
    for salt in (b"", b"other"):
        assert next(affinity.find(affinity.prefixes(prompt, salt), range(4)), None) is None


def test_router_forgets_the_cached_prefixes_of_a_dead_replica() -> None:
    router = Router(2, PAGE)
    (share,) = place(router, 0, tokens(400))
    router.remove(share.replica, 0)
    router.remove_replica(share.replica)
    assert len(router.affinity) == 0
    (again,) = place(router, 1, tokens(400))
    assert again.replica != share.replica  # the least recently used of two idle replicas


@given(st.integers(0, 300), st.integers(0, 300), st.sampled_from([1, 8, 16]))
def test_prefix_affinity_finds_two_thirds_of_the_common_prefix(common: int, more: int, page: int) -> None:
    affinity = PrefixAffinity(page)
    one = np.concatenate([tokens(common), np.array([2000], np.int32), tokens(more, seed=1)])
    other = np.concatenate([tokens(common), np.array([2001], np.int32), tokens(more, seed=2)])
    affinity.add(affinity.prefixes(one), 5)
    found = next(affinity.find(affinity.prefixes(other), range(8)), (0, []))
    assert found[0] <= common
    assert found[0] >= 2 * common / 3 - 2 * page
    assert found[1] == ([5] if found[0] else [])


def test_prefix_affinity_evicts_least_recently_used_prefixes() -> None:
    affinity = PrefixAffinity(PAGE, max_prefixes=100)
    kept = affinity.prefixes(tokens(64))
    for seed in range(200):
        affinity.add(kept, 1)
        affinity.add(affinity.prefixes(tokens(64, seed)), 0)
    assert len(affinity) == 100
    assert next(affinity.find(kept, [0, 1])) == (64, [0, 1])  # the prompt of seed 0 is the same
    assert list(affinity.find(affinity.prefixes(tokens(64, 1)), [0, 1])) == []


def test_router_splits_many_samples_that_would_overload_one_replica() -> None:
    router = Router(2, PAGE)
    many = SamplingParams(n=1024, max_tokens=100, ignore_eos=True)
    assert [len(share.samples) for share in place(router, 0, tokens(100), many)] == [512, 512]
    few = SamplingParams(n=2 * MIN_SPLIT_SAMPLES - 1, max_tokens=100, ignore_eos=True)
    assert len(place(router, 1, tokens(100, seed=1), few)) == 1
    # Few tokens beside the present load: the request is not split, so its prompt is computed once.
    small = SamplingParams(n=2 * MIN_SPLIT_SAMPLES, max_tokens=2, ignore_eos=True)
    assert len(place(router, 2, tokens(100, seed=2), small)) == 1
    assert router.loads[0].tokens + router.loads[1].tokens == 102_500 + 100 + 6300 + 100 + 128 + 100


@given(
    st.integers(1, 5000),
    st.integers(1, 500),
    st.integers(0, 5000),
    st.lists(st.integers(0, 10**6), min_size=1, max_size=8),
)
def test_spread_assigns_each_sample_once_and_levels_the_loads(
    count: int, each: int, prompt: int, loads: list[int]
) -> None:
    shares = split_samples(range(count), each, prompt, dict(enumerate(loads)))
    assert [sample for share in shares for sample in share.samples] == list(range(count))
    assert len(set(replicas(shares))) == len(shares)
    if len(shares) > 1:
        assert min(len(share.samples) for share in shares) >= MIN_SPLIT_SAMPLES - 1
        after = [loads[share.replica] + prompt + len(share.samples) * each for share in shares]
        assert max(after) - min(after) <= 2 * each
        assert max(after) <= min(loads) + prompt + count * each  # not higher than without the split


def test_replica_load_falls_with_reported_tokens_and_ended_samples() -> None:
    one = ReplicaLoad()
    one.add(7, prompt=50, samples=2, expected_tokens=10)
    one.add(8, prompt=5, samples=1, expected_tokens=3)
    one.report([7, 9], np.array([2, 1]))  # request 9 is not open
    assert one.tokens == 18 + 8
    one.end(7, 1)
    assert one.tokens == 10 + 8
    for _ in range(20):
        one.report([7, 8], np.array([1, 1]))
    assert one.tokens == 1 + 1  # both run longer than expected and count as one token each
    one.end(7, 1)
    one.remove(7)
    one.remove(8)
    one.remove(8)
    assert (one.tokens, len(one)) == (0, 0)


def test_replica_load_grows_to_any_number_of_requests() -> None:
    one = ReplicaLoad()
    for rid in range(1000):
        one.add(rid, prompt=rid, samples=1, expected_tokens=1)
    assert one.tokens == sum(range(1000)) + 1000
    for rid in range(1000):
        one.remove(rid)
    assert (one.tokens, len(one), len(one._left)) == (0, 0, 1024)


@pytest.mark.parametrize("mean", [20, 3000])
def test_output_lengths_learn_from_samples_cut_off_by_their_limit(mean: int) -> None:
    lengths, rng, limit = OutputLengths(), np.random.default_rng(0), 512
    for life in rng.geometric(1 / mean, 4000).tolist():
        lengths.observe(min(life, limit), ended=life <= limit)
    assert lengths.expected(limit) == pytest.approx(mean * (1 - np.exp(-limit / mean)), rel=0.15)
    assert lengths.expected(1) == 1


def test_router_learns_lengths_only_from_samples_without_ignore_eos() -> None:
    router = Router(2, PAGE)
    for rid, ignore_eos in enumerate([True] * 500 + [False] * 2000):
        params = SamplingParams(max_tokens=100, ignore_eos=ignore_eos)
        (share,) = place(router, rid, tokens(20), params)
        reason, count = ("length", 100) if ignore_eos else ("stop", 10)
        router.end(share.replica, rid, params, {0: Finished(rid, 0, reason, count)})  # type: ignore[arg-type]
        router.remove(share.replica, rid)
    place(router, 9999, tokens(20), SamplingParams(max_tokens=100))
    assert sum(outstanding.tokens for outstanding in router.loads) == 20 + router.lengths.expected(100)
    assert 9 <= router.lengths.expected(100) <= 15


def test_output_lengths_stay_finite_when_no_sample_ends_on_its_own() -> None:
    lengths = OutputLengths()
    for _ in range(800_000):
        lengths.observe(1, ended=False)
    assert lengths.expected(7) == 7


def test_router_learns_no_length_from_samples_without_tokens() -> None:
    router = Router(2, PAGE)
    params = SamplingParams(max_tokens=100)
    expected = router.lengths.expected(100)
    for rid in range(2000):
        (share,) = place(router, rid, tokens(20), params)
        router.end(share.replica, rid, params, {0: Finished(rid, 0, "length", 0)})
        router.remove(share.replica, rid)
    assert router.lengths.expected(100) == expected

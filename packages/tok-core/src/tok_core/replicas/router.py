"""Router: choose the replica of a request by cached prefix, unless that replica's load is too high."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tok_core.messages import Finished, Int32, Int64
from tok_core.replicas.prefix_affinity import PrefixAffinity, PromptPrefix
from tok_core.replicas.replica_load import OutputLengths, ReplicaLoad
from tok_core.sampling_params import SamplingParams

MAX_LOAD_RATIO = 1.25  # a replica with the cached prefix is chosen up to this multiple of the mean load
LOAD_PER_CACHED_TOKEN = 8  # tokens by which that limit rises for each prompt token that the replica has cached
MIN_SPLIT_SAMPLES = 32  # minimum samples per replica of a split request; fewer are not worth another prefill


class RoutingRequest(NamedTuple):
    """Properties of a request that decide its routing. `max_output_tokens`: of a sample, by the model's length."""

    rid: int
    tokens: Int32
    params: SamplingParams
    max_output_tokens: int
    prefixes: Sequence[PromptPrefix]


class Assignment(NamedTuple):
    """The samples of a request that are assigned to one replica."""

    replica: int
    samples: range


class Router:
    """Chooser of replicas by load and prefix affinity. For one thread at a time, except for `routing_request`."""

    def __init__(self, replicas: int, page_size: int) -> None:
        self.loads = [ReplicaLoad() for _ in range(replicas)]
        self.lengths = OutputLengths()
        self.affinity = PrefixAffinity(page_size)
        self._placed = itertools.count(1)
        self._last = [0] * replicas  # number of each replica's last assignment; breaks ties in favour of the oldest

    @property
    def several(self) -> bool:
        """Return whether there are several replicas."""
        return len(self.loads) > 1

    def routing_request(
        self, rid: int, tokens: Int32, params: SamplingParams, max_output_tokens: int, salt: bytes = b""
    ) -> RoutingRequest:
        """Return the routing properties of a request."""
        prefixes = self.affinity.prefixes(tokens, salt) if self.several else ()
        return RoutingRequest(rid, tokens, params, max_output_tokens, prefixes)

    def assign(self, request: RoutingRequest, samples: range, ready: Sequence[int], *, split: bool) -> list[Assignment]:
        """Assign samples to one of the replicas `ready`, or to several if `split` and the load justifies it."""
        if not self.several:
            return [Assignment(ready[0], samples)]
        prompt, expected_tokens = len(request.tokens), self._expected_tokens(request)
        loads = {replica: self.loads[replica].tokens for replica in ready}
        overloaded = _overloads(prompt + len(samples) * expected_tokens, loads)
        if split and overloaded and len(samples) >= 2 * MIN_SPLIT_SAMPLES:
            shares = split_samples(samples, expected_tokens, prompt, loads)
        else:
            shares = [Assignment(self._choose(request.prefixes, loads), samples)]
        for replica, part in shares:
            self.loads[replica].add(request.rid, prompt, len(part), expected_tokens)
            self.affinity.add(request.prefixes, replica)
            self._last[replica] = next(self._placed)
        return shares

    def report(self, replica: int, rids: list[int], counts: Int64) -> None:
        """Subtract reported tokens from the replica's load: `counts[u]` of request `rids[u]`."""
        if self.several:
            self.loads[replica].report(rids, counts)

    def end(self, replica: int, rid: int, params: SamplingParams, ends: Mapping[int, Finished]) -> None:
        """Subtract samples that have ended on the replica from its load, and learn from their lengths."""
        if self.several:
            self.loads[replica].end(rid, len(ends))
            if not params.ignore_eos:
                for end in ends.values():
                    if end.tokens:  # else no token was requested, or none could be sampled: not a length to learn from
                        self.lengths.observe(end.tokens, ended=end.reason == "stop")

    def remove(self, replica: int, rid: int) -> None:
        """Remove the request from the replica's load."""
        if self.several:
            self.loads[replica].remove(rid)

    def remove_replica(self, replica: int) -> None:
        """Forget the replica's cached prefixes, after its death."""
        self.affinity.remove_replica(replica)

    def _expected_tokens(self, request: RoutingRequest) -> int:
        """Return the expected number of tokens of a sample."""
        params, max_output_tokens = request.params, request.max_output_tokens
        limit = max_output_tokens if params.max_tokens is None else min(params.max_tokens, max_output_tokens)
        return max(1, limit) if params.ignore_eos else self.lengths.expected(limit)

    def _choose(self, prefixes: Sequence[PromptPrefix], loads: Mapping[int, int]) -> int:
        mean = sum(loads.values()) / len(loads)
        for length, holders in self.affinity.find(prefixes, list(loads)):
            limit = MAX_LOAD_RATIO * mean + LOAD_PER_CACHED_TOKEN * length
            candidates = [replica for replica in holders if loads[replica] <= limit]
            if candidates:
                return self._least_loaded(candidates, loads)
        return self._least_loaded(list(loads), loads)

    def _least_loaded(self, replicas: Sequence[int], loads: Mapping[int, int]) -> int:
        return min(replicas, key=lambda replica: (loads[replica], self._last[replica]))


def _overloads(tokens: int, loads: Mapping[int, int]) -> bool:
    """Return whether `tokens` more would raise the least loaded replica above MAX_LOAD_RATIO times the new mean."""
    return min(loads.values()) + tokens > MAX_LOAD_RATIO * (sum(loads.values()) + tokens) / len(loads)


def split_samples(samples: range, expected_tokens: int, prompt: int, loads: Mapping[int, int]) -> list[Assignment]:
    """Split the samples so that the chosen replicas' loads become equal, with at least MIN_SPLIT_SAMPLES each.

    A sample costs `expected_tokens`, and every share costs `prompt` tokens in addition. Shares are in sample order.
    """
    ordered = sorted(loads, key=loads.__getitem__)
    for count in range(len(ordered), 1, -1):
        chosen = ordered[:count]
        total = sum(loads[replica] for replica in chosen) + count * prompt + len(samples) * expected_tokens
        ideal = [(total / count - loads[replica] - prompt) / expected_tokens for replica in chosen]
        if ideal[-1] >= MIN_SPLIT_SAMPLES:
            bounds = [samples.start + round(sum(ideal[:i])) for i in range(count)] + [samples.stop]
            parts = itertools.starmap(range, itertools.pairwise(bounds))
            return [Assignment(replica, part) for replica, part in zip(chosen, parts, strict=True)]
    return [Assignment(ordered[0], samples)]

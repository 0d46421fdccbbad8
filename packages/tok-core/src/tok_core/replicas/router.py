"""Router: choose the replica of a request by cached prefix, unless that replica's load is too high."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tok_core.messages import Finished, Int32, Int64
from tok_core.replicas.prefix_affinity import PrefixAffinity, PromptPrefix
from tok_core.replicas.replica_load import OutputLengths, ReplicaLoad
from tok_core.sampling_params import SamplingParams

BOUND = 1.25  # limit of a replica's load for being preferred, as a multiple of the mean load
SPARE = 8  # tokens by which this limit rises for each prompt token that the replica has cached
MIN_SPLIT_SAMPLES = 32  # minimum samples per replica of a split request; fewer are not worth another prefill


class RoutingRequest(NamedTuple):
    """Properties of a request that decide its routing. `room`: maximum number of tokens after its prompt."""

    rid: int
    tokens: Int32
    params: SamplingParams
    room: int
    prefixes: Sequence[PromptPrefix]


class Assignment(NamedTuple):
    """The samples of a request that are assigned to one replica."""

    replica: int
    samples: range


class Router:
    """Chooser of replicas by load and prefix affinity. For one thread at a time, except for `ask`."""

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

    def ask(self, rid: int, tokens: Int32, params: SamplingParams, room: int, salt: bytes = b"") -> RoutingRequest:
        """Return the routing properties of a request."""
        return RoutingRequest(rid, tokens, params, room, self.affinity.prefixes(tokens, salt) if self.several else ())

    def assign(self, asked: RoutingRequest, samples: range, ready: Sequence[int], *, split: bool) -> list[Assignment]:
        """Assign samples to one of the replicas `ready`, or to several if `split` and the load justifies it."""
        if not self.several:
            return [Assignment(ready[0], samples)]
        prompt, each = len(asked.tokens), self._expected(asked)
        loads = {replica: self.loads[replica].tokens for replica in ready}
        if split and _too_much(prompt + len(samples) * each, loads) and len(samples) >= 2 * MIN_SPLIT_SAMPLES:
            shares = spread(samples, each, prompt, loads)
        else:
            shares = [Assignment(self._choose(asked.prefixes, loads), samples)]
        for replica, part in shares:
            self.loads[replica].add(asked.rid, prompt, len(part), each)
            self.affinity.add(asked.prefixes, replica)
            self._last[replica] = next(self._placed)
        return shares

    def report(self, replica: int, rids: list[int], counts: Int64) -> None:
        """Subtract reported tokens from the replica's load: `counts[u]` of request `rids[u]`."""
        if self.several:
            self.loads[replica].report(rids, counts)

    def end(self, replica: int, rid: int, params: SamplingParams, ends: Mapping[int, Finished]) -> None:
        """Note samples of the request that have ended on the replica, and learn from their lengths."""
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

    def _expected(self, asked: RoutingRequest) -> int:
        params, room = asked.params, asked.room
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        return max(1, limit) if params.ignore_eos else self.lengths.expected(limit)

    def _choose(self, prefixes: Sequence[PromptPrefix], loads: Mapping[int, int]) -> int:
        mean = sum(loads.values()) / len(loads)
        for length, having in self.affinity.find(prefixes, list(loads)):
            within = [replica for replica in having if loads[replica] <= BOUND * mean + SPARE * length]
            if within:
                return self._least(within, loads)
        return self._least(list(loads), loads)

    def _least(self, replicas: Sequence[int], loads: Mapping[int, int]) -> int:
        return min(replicas, key=lambda replica: (loads[replica], self._last[replica]))


def _too_much(work: int, loads: Mapping[int, int]) -> bool:
    """Return whether `work` tokens more would raise the least loaded replica above BOUND times the new mean load."""
    return min(loads.values()) + work > BOUND * (sum(loads.values()) + work) / len(loads)


def spread(samples: range, each: int, prompt: int, loads: Mapping[int, int]) -> list[Assignment]:
    """Split the samples so that the chosen replicas' loads become equal, each with MIN_SPLIT_SAMPLES at least.

    A sample costs `each` tokens, and every share costs `prompt` tokens in addition. Shares are in order of samples.
    """
    ordered = sorted(loads, key=loads.__getitem__)
    for count in range(len(ordered), 1, -1):
        chosen = ordered[:count]
        level = (sum(loads[one] for one in chosen) + count * prompt + len(samples) * each) / count
        ideal = [(level - loads[one] - prompt) / each for one in chosen]
        if ideal[-1] >= MIN_SPLIT_SAMPLES:
            bounds = [samples.start + round(sum(ideal[:i])) for i in range(count)] + [samples.stop]
            return [Assignment(one, range(*ends)) for one, ends in zip(chosen, itertools.pairwise(bounds), strict=True)]
    return [Assignment(ordered[0], samples)]

"""Router: which replica gets a request: one that has its prompt's beginning, unless that has too much to do already."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tok_core.messages import Finished, Int32, Int64
from tok_core.replicas.prefix_affinity import PrefixAffinity, PromptPrefix
from tok_core.replicas.replica_load import OutputLengths, ReplicaLoad
from tok_core.sampling_params import SamplingParams

BOUND = 1.25  # times the mean of the outstanding tokens: as much a replica may have and still be preferred
SPARE = 8  # tokens more, for each token of the prompt that it need not compute
MIN_SPLIT_SAMPLES = 32  # samples; fewer are not worth computing their prompt once more


class RoutingRequest(NamedTuple):
    """What a request asks for. `room`: most tokens that may follow its prompt."""

    rid: int
    tokens: Int32
    params: SamplingParams
    room: int
    beginnings: Sequence[PromptPrefix]


class Assignment(NamedTuple):
    """The samples of a request that one replica gets."""

    replica: int
    samples: range


class Router:
    """For one thread at a time, but for `ask`."""

    def __init__(self, replicas: int, page_size: int) -> None:
        self.loads = [ReplicaLoad() for _ in range(replicas)]
        self.lengths = OutputLengths()
        self.affinity = PrefixAffinity(page_size)
        self._placed = itertools.count(1)
        self._last = [0] * replicas  # when each got a share: the one that waits longest comes first among equals

    @property
    def several(self) -> bool:
        """Whether there is a choice."""
        return len(self.loads) > 1

    def ask(self, rid: int, tokens: Int32, params: SamplingParams, room: int, salt: bytes = b"") -> RoutingRequest:
        """What is to be placed."""
        return RoutingRequest(rid, tokens, params, room, self.affinity.beginnings(tokens, salt) if self.several else ())

    def place(self, asked: RoutingRequest, samples: range, ready: Sequence[int], *, split: bool) -> list[Assignment]:
        """Chooses among the replicas `ready`, at least one; several of them where `split` and that is worth it."""
        if not self.several:
            return [Assignment(ready[0], samples)]
        prompt, each = len(asked.tokens), self._expected(asked)
        loads = {replica: self.loads[replica].tokens for replica in ready}
        if split and _too_much(prompt + len(samples) * each, loads) and len(samples) >= 2 * MIN_SPLIT_SAMPLES:
            shares = spread(samples, each, prompt, loads)
        else:
            shares = [Assignment(self._choose(asked.beginnings, loads), samples)]
        for replica, part in shares:
            self.loads[replica].add(asked.rid, prompt, len(part), each)
            self.affinity.add(asked.beginnings, replica)
            self._last[replica] = next(self._placed)
        return shares

    def report(self, replica: int, rids: list[int], counts: Int64) -> None:
        """The replica has reported so many tokens of each request."""
        if self.several:
            self.loads[replica].report(rids, counts)

    def end(self, replica: int, rid: int, params: SamplingParams, ends: Mapping[int, Finished]) -> None:
        """Samples of the request have ended on the replica."""
        if self.several:
            self.loads[replica].end(rid, len(ends))
            if not params.ignore_eos:
                for end in ends.values():
                    if end.tokens:  # else none was asked for, or nothing could be drawn: no length
                        self.lengths.learn(end.tokens, ended=end.reason == "stop")

    def remove(self, replica: int, rid: int) -> None:
        """The replica has nothing to do for the request any more."""
        if self.several:
            self.loads[replica].remove(rid)

    def forget(self, replica: int) -> None:
        """The replica has lost its cache."""
        self.affinity.forget(replica)

    def _expected(self, asked: RoutingRequest) -> int:
        params, room = asked.params, asked.room
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        return max(1, limit) if params.ignore_eos else self.lengths.expected(limit)

    def _choose(self, beginnings: Sequence[PromptPrefix], loads: Mapping[int, int]) -> int:
        mean = sum(loads.values()) / len(loads)
        for length, having in self.affinity.find(beginnings, list(loads)):
            within = [replica for replica in having if loads[replica] <= BOUND * mean + SPARE * length]
            if within:
                return self._least(within, loads)
        return self._least(list(loads), loads)

    def _least(self, replicas: Sequence[int], loads: Mapping[int, int]) -> int:
        return min(replicas, key=lambda replica: (loads[replica], self._last[replica]))


def _too_much(work: int, loads: Mapping[int, int]) -> bool:
    """Whether `work` on the replica with the least to do would give it more than it should have."""
    return min(loads.values()) + work > BOUND * (sum(loads.values()) + work) / len(loads)


def spread(samples: range, each: int, prompt: int, loads: Mapping[int, int]) -> list[Assignment]:
    """Shares of the samples that level the replicas' loads, none of them small, in order of the samples.

    A sample costs `each` tokens, and every share `prompt` tokens besides.
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

"""SequenceTable: every running sequence as one row of NumPy columns, so that a step costs array operations only."""

from __future__ import annotations

from collections import deque
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from tok_core.messages import Int32, Int64
from tok_core.sampling import SamplingParams


class State(IntEnum):
    """What a slot is doing. FREE → PREFILL → DECODE → DRAIN → FREE; PREEMPTED leaves from PREFILL or DECODE."""

    FREE = 0
    PREFILL = 1  # part of its tokens is not in the cache yet
    DECODE = 2  # one token a step
    DRAIN = 3  # every token it may have is scheduled; the last ones are not back yet
    PREEMPTED = 4  # without pages; tokens scheduled before are not back yet


class Request:
    """One open request: its prompt, what it asks for, and the slots of its running samples.

    `limit`: tokens, prompt and output, at which its samples end by length.
    """

    __slots__ = ("arrival", "left", "limit", "params", "prompt", "reported", "rid", "slots", "stop_set")

    def __init__(self, rid: int, prompt: Int32, params: SamplingParams, arrival: int, max_len: int) -> None:
        self.rid = rid
        self.prompt = prompt
        self.params = params
        self.arrival = arrival
        self.stop_set: int | None = None  # what ends its samples; set when the first of them starts
        self.limit = min(max_len, len(prompt) + (params.max_tokens or max_len))
        self.left = params.n  # samples that have not ended
        self.slots: dict[int, int] = {}
        self.reported = False  # whether the engine knows how much of the prompt was cached


class Pending:
    """Samples of one request that wait for a slot. The first of `samples` prefills, the others fork from it.

    `tokens` are the prompt, or for a preempted sample the prompt and what it had generated.
    """

    __slots__ = ("request", "samples", "tokens")

    def __init__(self, request: Request, samples: deque[int], tokens: Int32) -> None:
        self.request = request
        self.samples = samples
        self.tokens = tokens

    @property
    def order(self) -> tuple[int, int]:
        """First come, first served: by request, then by sample."""
        return (self.request.arrival, self.samples[0])


class SequenceTable:
    """Columns indexed by slot. Legend: S slots, P pages a slot may hold, M the longest sequence in tokens.

    length      positions in the cache, or scheduled to be; while decoding, the next token to feed stands there
    target      tokens to prefill before the first draw
    known       tokens whose values the manager has (prompt and returned ones)
    limit       tokens at which the sequence ends by length
    min_total   tokens before which nothing but `limit` ends it
    pages       page ids; the first `num_shared` belong to the prefix tree down to `node`, the others to the slot
    announced   whether the worker knows the slot's present owner
    epoch       grows whenever the slot is freed: tells late tokens of an earlier owner from the present one's
    order       age: smaller came first; the youngest is preempted first
    """

    def __init__(self, slots: int, max_len: int, page_size: int) -> None:
        self.slots = slots
        self.page_size = page_size
        per_slot = -(-max_len // page_size)

        def column(dtype: type) -> NDArray[np.generic]:
            return np.zeros(slots, dtype)

        self.state = np.zeros(slots, np.uint8)
        self.announced = np.zeros(slots, np.bool_)
        self.epoch = np.zeros(slots, np.int64)
        self.order = np.zeros(slots, np.int64)
        self.rid = np.zeros(slots, np.int64)
        self.sample = np.zeros(slots, np.int32)
        self.length = np.zeros(slots, np.int32)
        self.target = np.zeros(slots, np.int32)
        self.known = np.zeros(slots, np.int32)
        self.prompt_len = np.zeros(slots, np.int32)
        self.limit = np.zeros(slots, np.int32)
        self.min_total = np.zeros(slots, np.int32)
        self.num_pages = np.zeros(slots, np.int32)
        self.num_shared = np.zeros(slots, np.int32)
        self.node = np.zeros(slots, np.int32)
        self.stop_set = np.zeros(slots, np.int32)
        self.filters = np.zeros(slots, np.bool_)
        self.penalises = np.zeros(slots, np.bool_)
        self.bias_until = np.zeros(slots, np.int32)
        self.greedy = np.zeros(slots, np.bool_)
        self.top_logprobs = np.zeros(slots, np.int32)
        # Touched lazily by the operating system: rows cost memory only as far as sequences reach.
        self.tokens: Int32 = np.zeros((slots, max_len), np.int32)
        self.pages: Int32 = np.zeros((slots, per_slot), np.int32)
        self.requests: list[Request | None] = [None] * slots
        self._free = list(range(slots - 1, -1, -1))

    @property
    def free_slots(self) -> int:
        """Slots that nobody uses."""
        return len(self._free)

    def in_state(self, state: State) -> Int64:
        """Slots in `state`, ascending."""
        return np.flatnonzero(self.state == state)

    def claim(self, request: Request, sample: int, tokens: Int32) -> int:
        """Gives a free slot to one sample that is to prefill `tokens`; returns the slot."""
        slot = self._free.pop()
        params, prompt_len = request.params, len(request.prompt)
        self.requests[slot] = request
        request.slots[sample] = slot
        self.state[slot] = State.PREFILL
        self.announced[slot] = False
        self.order[slot] = request.arrival * (1 << 20) + sample
        self.rid[slot] = request.rid
        self.sample[slot] = sample
        self.length[slot] = 0
        self.target[slot] = self.known[slot] = len(tokens)
        self.prompt_len[slot] = prompt_len
        self.limit[slot] = request.limit
        self.min_total[slot] = prompt_len + min(params.min_tokens, request.limit)
        self.num_pages[slot] = self.num_shared[slot] = 0
        assert request.stop_set is not None
        self.stop_set[slot] = request.stop_set
        self.filters[slot] = params.filters and params.temperature > 0
        self.penalises[slot] = params.penalises
        self.bias_until[slot] = _bias_until(request.params, prompt_len)
        self.greedy[slot] = params.temperature == 0
        self.top_logprobs[slot] = params.logprobs or 0
        self.tokens[slot, : len(tokens)] = tokens
        return slot

    def free(self, slot: int) -> None:
        """Takes the slot back. Its pages and node lock must have been given up before."""
        request = self.requests[slot]
        assert request is not None
        assert self.num_pages[slot] == 0
        del request.slots[int(self.sample[slot])]
        self.requests[slot] = None
        self.state[slot] = State.FREE
        self.epoch[slot] += 1
        self._free.append(slot)

    def total(self, slots: Int64) -> Int32:
        """Tokens of decoding sequences, drawn ones not yet returned included."""
        return self.length[slots] + 1


NEVER = np.iinfo(np.int32).max


def _bias_until(params: SamplingParams, prompt_len: int) -> int:
    """Position below which the sample's draws need the bias table: always for logit_bias, else for min_tokens."""
    return NEVER if params.logit_bias else prompt_len + min(params.min_tokens, NEVER - prompt_len)

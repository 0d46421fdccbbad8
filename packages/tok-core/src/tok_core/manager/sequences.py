"""Keep every running sequence as one row of NumPy columns, so that a step costs array operations only."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import numpy as np

from tok_core.manager.requests import Request
from tok_core.messages import Int32, Int64

if TYPE_CHECKING:
    from tok_core.grammar import Mask
    from tok_core.manager.grammar_workers import MatcherState

NOBODY: Final[Int64] = np.empty(0, np.int64)  # no slots


def sparse_zeros(shape: Sequence[int]) -> Int32:
    """Return an array of int32 zeros that is backed by small memory pages.

    NumPy asks the operating system for huge pages of 2 MiB, each of which is filled as a whole when one entry of it is
    written. A short sequence in each of thousands of long rows would then take gigabytes, and seconds. Memory of a row
    that was written once stays allocated. Raises MemoryError that names the shape.
    """
    size = math.prod(shape) * np.dtype(np.int32).itemsize
    try:
        memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the system refuses {size / 2**30:.1f} GiB for an array of shape {tuple(shape)}") from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages does not know the advice
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.int32, math.prod(shape)).reshape(shape)


class State:
    """State of a slot, and the states that may follow it:

    FREE → PREFILL, or DECODE or DRAIN (samples that fork or start late)
    PREFILL → DECODE, DRAIN (its first token is its last), PREEMPTED, ENDED (cancelled)
    DECODE → DRAIN, PREFILL (its grammar has appended tokens), PREEMPTED, ENDED (stopped or cancelled)
    DRAIN → ENDED
    PREEMPTED → FREE (it waits again, has stopped or was cancelled)
    ENDED → FREE

    States are plain integers: NumPy takes ten times as long to compare a column with a member of an enumeration.
    """

    FREE: Final = 0
    PREFILL: Final = 1  # some of its tokens are not in the cache yet
    DECODE: Final = 2  # one token per step
    DRAIN: Final = 3  # all tokens up to its limit are scheduled; the last ones are not back yet
    PREEMPTED: Final = 4  # without pages; tokens scheduled before are not back yet
    ENDED: Final = 5  # its pages are not released yet


class SequenceTable:
    """Running sequences as columns indexed by slot.

    At most `max_running` slots have a sequence; `draft_slots` more are only lent to drafts.

    Legend: S slots, P pages a slot may hold, M the longest sequence in tokens.

    tokens             int32 [S, M], prompt and output tokens
    length             positions in the cache, or scheduled to be; while decoding, `tokens[slot, length]` is the next to
                       feed
    ahead              drafted tokens in flight: positions by which `length` may grow once they are accepted
    target             tokens to prefill before the first token is sampled
    known              tokens whose values the manager has (prompt and returned ones)
    limit              tokens at which the sequence ends by length
    certain_length     tokens that it has at least when it ends, unless it is cancelled; for the forecast
    unstopped_length   number of tokens up to which only `limit` ends it; stop conditions apply to longer ones
    eos_from_position  first sampled position at which an EOS id ends it; position p holds the (p + 1)-th token
    followed           output tokens that the length model has counted
    pages              int32 [S, P], page ids; the first `num_shared` belong to the prefix tree down to `node`, the
                       others to the slot
    announced          whether the worker knows the slot's present owner
    moved              whether accepted drafts have moved it past the position that the worker knows
    epoch              incremented whenever the slot's owner has ended: late tokens of an earlier owner have a smaller
                       one
    microbatch         pipeline only: microbatch in which it decodes
    last_sampled_step  pipeline only: last step in which its present owner sampled
    guided             whether a grammar restricts its tokens
    allowed_set        number of its request's allowed tokens in `AllowedTokens`; −1: all tokens
    held               whether it waits for the value of its last token, or for the mask of its grammar after it
    matchers           matcher states by slot, of guided sequences that have sampled
    draft_masks        masks of lent slots that verify drafts of guided sequences
    order              age: smaller came first
    account            number (`Account.id`) of its caller's account in its class
    started_overdue    whether it was started because it had waited too long
    priority           class: the smallest number is the highest class, served first and preempted last
    preempted          whether the sample was preempted for lack of pages before
    family             uint64, `Request.family`
    salt               salt of its request, by slot; kept until the slot has another owner
    """

    def __init__(self, max_running: int, max_len: int, page_size: int, draft_slots: int = 0) -> None:
        self.slots = slots = max_running + draft_slots
        self._draft_slots = draft_slots
        self.page_size = page_size
        per_slot = -(-max_len // page_size)
        self.state = np.zeros(slots, np.uint8)
        self.announced = np.zeros(slots, np.bool_)
        self.moved = np.zeros(slots, np.bool_)
        self.epoch = np.zeros(slots, np.int64)
        self.microbatch = np.zeros(slots, np.int64)
        self.last_sampled_step = np.zeros(slots, np.int64)
        self.guided = np.zeros(slots, np.bool_)
        self.allowed_set = np.full(slots, -1, np.int32)
        self.held = np.zeros(slots, np.bool_)
        self.matchers: dict[int, MatcherState] = {}
        self.draft_masks: dict[int, Mask] = {}
        self.order = np.zeros(slots, np.int64)
        self.priority = np.zeros(slots, np.int64)
        self.account = np.zeros(slots, np.int64)
        self.started_overdue = np.zeros(slots, np.bool_)
        self.preempted = np.zeros(slots, np.bool_)
        self.rid = np.zeros(slots, np.int64)
        self.family = np.zeros(slots, np.uint64)
        self.sample = np.zeros(slots, np.int32)
        self.length = np.zeros(slots, np.int32)
        self.ahead = np.zeros(slots, np.int32)
        self.target = np.zeros(slots, np.int32)
        self.known = np.zeros(slots, np.int32)
        self.prompt_len = np.zeros(slots, np.int32)
        self.limit = np.zeros(slots, np.int32)
        self.certain_length = np.zeros(slots, np.int32)
        self.unstopped_length = np.zeros(slots, np.int32)
        self.eos_from_position = np.zeros(slots, np.int32)
        self.num_pages = np.zeros(slots, np.int32)
        self.num_shared = np.zeros(slots, np.int32)
        self.node = np.zeros(slots, np.int32)
        self.stop_set = np.zeros(slots, np.int32)
        self.followed = np.zeros(slots, np.int32)
        self.filters = np.zeros(slots, np.bool_)
        self.penalises = np.zeros(slots, np.bool_)
        self.bias_until = np.zeros(slots, np.int32)
        self.greedy = np.zeros(slots, np.bool_)
        self.top_logprobs = np.zeros(slots, np.int32)
        self.tokens = sparse_zeros((slots, max_len))
        self.pages = sparse_zeros((slots, per_slot))
        self.requests: list[Request | None] = [None] * slots
        self.salt = [b""] * slots
        self.requests_running = 0  # requests with a slot
        self.ended = 0  # slots in state ENDED
        self._free = list(range(slots - 1, -1, -1))

    @property
    def free_slots(self) -> int:
        """Return the number of samples that can start: unused slots, without as many as are kept for drafts."""
        return len(self._free) - self._draft_slots

    @property
    def lendable_slots(self) -> int:
        """Return the number of unused slots, each of which can be lent to a drafted token."""
        return len(self._free)

    @property
    def sequences_running(self) -> int:
        """Return the number of slots whose sequence has not ended."""
        return self.slots - len(self._free) - self.ended

    def in_state(self, state: int) -> Int64:
        """Return the slots in `state`, ascending."""
        slots: Int64 = (self.state == state).nonzero()[0]
        return slots

    def active(self) -> Int64:
        """Return the slots whose sequences prefill, then those whose sequences decode: these can be preempted."""
        return np.concatenate((self.in_state(State.PREFILL), self.in_state(State.DECODE)))

    def claim(self, request: Request, samples: Sequence[int], tokens: Int32) -> Int64:
        """Assign a free slot to each of `samples`, with `tokens` to prefill; return the slots in order."""
        if len(samples) == 1:
            return np.array([self.claim_one(request, samples[0], tokens)])
        slots = self._free[: -len(samples) - 1 : -1]
        del self._free[-len(samples) :]
        self.requests_running += not request.slots
        request.slots.update(zip(samples, slots, strict=True))
        request.hold(len(samples))
        for slot in slots:
            self.requests[slot] = request
            self.salt[slot] = request.salt
        self.preempted[slots] = [sample in request.preempted for sample in samples] if request.preempted else False
        found = np.array(slots)
        self._fill(found, request, np.array(samples), tokens)
        return found

    def claim_one(self, request: Request, sample: int, tokens: Int32) -> int:
        """Like `claim` for one sample, in a third of the time: NumPy sets an entry by a plain integer."""
        slot = self._free.pop()
        self.requests_running += not request.slots
        request.slots[sample] = slot
        request.hold(1)
        self.requests[slot] = request
        self.salt[slot] = request.salt
        self.preempted[slot] = sample in request.preempted
        self._fill(slot, request, sample, tokens)
        return slot

    def _fill(self, slots: int | Int64, request: Request, samples: int | Int64, tokens: Int32) -> None:
        params, prompt_len = request.params, len(request.prompt)
        assert request.stop_set is not None
        self.state[slots] = State.PREFILL
        self.announced[slots] = self.moved[slots] = False
        self.last_sampled_step[slots] = 0
        self.guided[slots] = params.grammar is not None
        self.allowed_set[slots] = request.allowed_set
        self.held[slots] = False
        self.order[slots] = request.serial * (1 << 20) + samples
        self.priority[slots] = params.priority
        self.account[slots] = request.account.id
        self.rid[slots] = request.rid
        self.family[slots] = request.family
        self.sample[slots] = samples
        self.length[slots] = self.ahead[slots] = 0
        self.target[slots] = self.known[slots] = len(tokens)
        self.prompt_len[slots] = prompt_len
        self.limit[slots] = request.limit
        self.certain_length[slots] = request.certain_length
        unstopped_length = prompt_len + min(params.min_tokens, request.limit)
        self.unstopped_length[slots] = unstopped_length
        self.eos_from_position[slots] = NEVER if params.ignore_eos else unstopped_length
        self.num_pages[slots] = self.num_shared[slots] = 0
        self.stop_set[slots] = request.stop_set
        self.followed[slots] = len(tokens) - prompt_len
        self.filters[slots] = params.filters and params.temperature > 0
        self.penalises[slots] = params.penalises
        self.bias_until[slots] = _bias_until(request)
        self.greedy[slots] = params.temperature == 0
        self.top_logprobs[slots] = params.logprobs or 0
        self.tokens[slots, : len(tokens)] = tokens

    def lend(self, sources: Int64) -> Int64:
        """Return a unused slot for each of `sources`, filled for a decode row with the parameters of its sequence.

        The slots remain unused. They may be claimed once the step is sent. Their limit is never reached.
        """
        slots = np.array(self._free[-len(sources) :])
        for column in (
            *(
                self.rid,
                self.sample,
                self.length,
                self.ahead,
                self.prompt_len,
                self.unstopped_length,
                self.eos_from_position,
            ),
            *(self.guided, self.allowed_set, self.filters, self.penalises, self.bias_until, self.greedy),
            self.top_logprobs,
        ):
            column[slots] = column[sources]
        self.limit[slots] = NEVER
        self.last_sampled_step[slots] = 0
        return slots

    def end(self, slots: Int64) -> None:
        """Mark sequences as ended. Their slots are not free yet and keep their pages."""
        for slot, sample in zip(slots.tolist(), self.sample[slots].tolist(), strict=True):
            request = self.requests[slot]
            assert request is not None
            del request.slots[sample]
            request.hold(-1)
            self.requests_running -= not request.slots
            self.requests[slot] = None
        self.state[slots] = State.ENDED
        self.started_overdue[slots] = False
        self.epoch[slots] += 1
        self.ended += len(slots)

    def free(self, slots: Int64) -> None:
        """Free the slots. Their pages and node locks must have been released before."""
        assert not self.num_pages[slots].any()
        self.end(slots[self.state[slots] != State.ENDED])
        self.state[slots] = State.FREE
        self.ended -= len(slots)
        self._free += slots.tolist()


NEVER: Final = 2**31 - 1
DRAFT_MARGIN: Final = 3  # tokens: a step and its drafts leave a sequence at least two below its limit, in any case


def microbatch_count(stages: int) -> int:
    """Return the number of microbatches of a pipeline, one of which is spare; 1 without a pipeline."""
    return stages + 1 if stages > 1 else 1


def _bias_until(request: Request) -> int:
    """Return the position below which sampling needs the bias table: NEVER with biases or bans, else for min_tokens."""
    prompt_len, min_tokens = len(request.prompt), request.params.min_tokens
    return NEVER if request.params.logit_bias or request.banned else prompt_len + min(min_tokens, NEVER - prompt_len)

"""Keep open requests, the accounts of their callers, and the queue of their samples that wait for a slot."""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING

from tok_core.messages import Float32, Int32
from tok_core.outputs import Pooling
from tok_core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tok_core.manager.grammar_workers import GrammarState, MatcherState


class Account:
    """Requests of one caller in one priority class.

    id       number of the account in the column `account` of the sequence table
    open     rids of its requests that have not ended
    running  samples that hold a slot or will fork from a prefilling leader
    holders  requests with at least one such sample
    checks   number of consecutive checks by `FairShares.check` that have found samples of it waiting
    """

    __slots__ = ("checks", "holders", "id", "open", "running")

    def __init__(self, account_id: int = 0) -> None:
        self.id = account_id
        self.open: set[int] = set()
        self.running = self.holders = 0
        self.checks = 0


class Request:
    """One open request: its prompt, its parameters, and the slots of its running samples.

    serial                number of the request, in order of arrival
    limit                 tokens, prompt and output, at which its samples end by length
    certain_length        tokens, prompt and output, that each of its samples has at least when it ends
    leader                slot that prefills the prompt now, for itself and the samples that fork from it
    wants_prompt_outputs  whether the leader's chunks still have to return prompt outputs (`requested_prompt_outputs`)
    grammar_state         state of its grammar
    parked_matchers       matcher states of samples that wait for a slot again, by sample
    tenant, salt, banned  as in `Submit`
    family                numbers of its salt and its prompt, for drafts (`Speculation.open`); 0 without speculation
    allowed_set           number of its allowed tokens in `AllowedTokens`; −1: all tokens
    account               its caller's account
    queued_at             when it joined the queue, in seconds
    running               samples that hold a slot or will fork from the leader
    displaced             samples that wait because others took their slots
    """

    __slots__ = (
        *("account", "allowed_set", "banned", "certain_length", "displaced", "family", "grammar_state", "leader"),
        *("left", "limit", "params"),
        *("parked_matchers", "pooled", "pooling", "preempted", "prompt", "queued_at", "reported", "rid", "running"),
        *("salt", "samples", "serial", "slots", "stop_set", "tenant", "unsampled", "wants_prompt_outputs"),
    )

    def __init__(
        self,
        rid: int,
        prompt: Int32,
        params: SamplingParams,
        serial: int,
        max_len: int,
        first_sample: int = 0,
        pooling: Pooling | None = None,
        tenant: str = "",
        salt: bytes = b"",
        banned: tuple[tuple[int, ...], ...] = (),
    ) -> None:
        self.rid = rid
        self.banned = banned
        self.allowed_set = -1
        self.tenant = tenant
        self.account = Account()
        self.queued_at = 0.0
        self.running = 0
        self.salt = salt
        self.family = 0
        self.prompt = prompt
        self.params = params
        self.serial = serial
        self.stop_set: int | None = None  # id in `StopSets`; set when the first of its samples starts
        self.limit = min(max_len, len(prompt) + (max_len if params.max_tokens is None else params.max_tokens))
        never = params.ignore_eos and not params.stop and not params.stop_token_ids
        self.certain_length = self.limit if never else min(len(prompt) + params.min_tokens, self.limit)
        self.samples = range(first_sample, first_sample + params.n)
        self.left = params.n  # samples that have not ended
        self.unsampled = params.n  # samples whose first token is not scheduled
        self.grammar_state: GrammarState | None = None
        self.parked_matchers: dict[int, MatcherState] = {}
        self.leader: int | None = None
        self.preempted: set[int] = set()  # samples that have been preempted for lack of pages
        self.displaced: set[int] = set()
        self.slots: dict[int, int] = {}
        self.reported = False  # whether its start was reported to the engine
        self.pooling = pooling
        self.pooled: Float32 | None = None  # sum of the parts of its embedding that are back
        self.wants_prompt_outputs = pooling is not None or params.prompt_logprobs is not None

    def hold(self, samples: int) -> None:
        """Add `samples`, which may be negative, to the number that hold a slot or will fork from the leader."""
        before = self.running
        self.running += samples
        self.account.running += samples
        if not before or not self.running:
            self.account.holders += (self.running > 0) - (before > 0)

    @property
    def needs_all(self) -> bool:
        """Return whether the leader has to compute all of the prompt, cached or not."""
        return self.wants_prompt_outputs and self.pooling != "last"


class Pending:
    """Samples of one request that wait for a slot.

    tokens  the prompt, or for a preempted sample the prompt and what it had generated
    fresh   whether no token has been sampled yet
    """

    __slots__ = ("fresh", "request", "samples", "tokens")

    def __init__(self, request: Request, samples: deque[int], tokens: Int32) -> None:
        self.request = request
        self.samples = samples
        self.tokens = tokens
        self.fresh = len(tokens) == len(request.prompt)

    @property
    def order(self) -> tuple[int, int, int]:
        """Return the sort key: class, then arrival of the request, then number of the sample."""
        return (self.request.params.priority, self.request.serial, self.samples[0])


class Accounts:
    """Accounts with open requests."""

    def __init__(self) -> None:
        self._classes: dict[int, dict[str, Account]] = {}  # by priority and tenant
        self._numbers = count(1)

    def open(self, request: Request) -> None:
        """Add a new request to its caller's account."""
        accounts = self._classes.setdefault(request.params.priority, {})
        account = accounts.get(request.tenant)
        if account is None:
            account = accounts[request.tenant] = Account(next(self._numbers))
        account.open.add(request.rid)
        request.account = account

    def close(self, request: Request) -> None:
        """Remove a request that has ended. Samples of it that still hold slots count until the slots are freed."""
        account = request.account
        account.open.discard(request.rid)
        accounts = self._classes.get(request.params.priority, {})
        if not account.open and accounts.get(request.tenant) is account:
            del accounts[request.tenant]
            if not accounts:
                del self._classes[request.params.priority]

    def of_class(self, priority: int) -> Iterable[Account]:
        """Return the accounts of one class."""
        return self._classes.get(priority, {}).values()

    def lowest_running(self) -> int | None:
        """Return the greatest priority number, which is the lowest class, with a running sample."""
        running = (one for one, accounts in self._classes.items() if any(each.running for each in accounts.values()))
        return max(running, default=None)


def _order(pending: Pending) -> tuple[int, int, int]:
    return pending.order


class CallerQueue:
    """Queue of one caller in one class: new requests by arrival, merged with samples put back at their place."""

    __slots__ = ("_back", "_fresh")

    def __init__(self) -> None:
        self._fresh: deque[Pending] = deque()
        self._back: list[Pending] = []

    def __len__(self) -> int:
        return len(self._fresh) + len(self._back)

    def __iter__(self) -> Iterator[Pending]:
        return heapq.merge(self._back, self._fresh, key=_order) if self._back else iter(self._fresh)

    @property
    def first(self) -> Pending:
        """Return the oldest entry; there must be one."""
        return next(iter(self))

    @property
    def account(self) -> Account:
        """Return the caller's account."""
        return (self._fresh or self._back)[0].request.account

    def samples(self, max_samples: int) -> int:
        """Return how many samples wait, or `max_samples` if that is less."""
        found = 0
        for pending in self:
            found += len(pending.samples)
            if found >= max_samples:
                return max_samples
        return found

    def append(self, pending: Pending) -> None:
        """Add a request that arrives after all the others."""
        self._fresh.append(pending)

    def put_back(self, pending: Pending) -> None:
        """Insert samples at their place by age."""
        insort(self._back, pending, key=_order)

    def take(self, pending: Pending) -> bool:
        """Remove an entry; return whether it was there."""
        if self._fresh and self._fresh[0] is pending:
            self._fresh.popleft()
            return True
        for entries in (self._back, self._fresh):
            with suppress(ValueError):
                entries.remove(pending)
                return True
        return False

    def remove(self, rids: set[int]) -> None:
        """Drop the samples of these requests."""
        self._fresh = deque(one for one in self._fresh if one.request.rid not in rids)
        self._back = [one for one in self._back if one.request.rid not in rids]


class WaitingQueue:
    """Samples that wait for a slot: queues by class and caller; of one caller, first come, first served."""

    def __init__(self) -> None:
        self._classes: dict[int, dict[str, CallerQueue]] = {}  # by priority, ascending, and tenant; no queue is empty

    def __len__(self) -> int:
        return sum(len(queue) for queues in self._classes.values() for queue in queues.values())

    def __bool__(self) -> bool:
        return bool(self._classes)

    def __iter__(self) -> Iterator[Pending]:
        """Iterate by class, and within a class by arrival, across callers."""
        for queues in self._classes.values():
            yield from heapq.merge(*queues.values(), key=_order) if len(queues) > 1 else next(iter(queues.values()))

    @property
    def min_waiting_priority(self) -> int | None:
        """Return the smallest priority number, which is the highest class, with a waiting sample."""
        return next(iter(self._classes), None)

    def classes(self) -> list[int]:
        """Return the priorities that wait, ascending."""
        return list(self._classes)

    def queues(self, priority: int) -> Collection[CallerQueue]:
        """Return the callers' queues of one class."""
        return self._classes.get(priority, {}).values()

    def append(self, pending: Pending) -> None:
        """Add a request that arrives after all the others."""
        self._queue_of(pending).append(pending)

    def put_back(self, pending: Pending) -> None:
        """Insert samples at their place by age."""
        self._queue_of(pending).put_back(pending)

    def take(self, pending: Pending) -> bool:
        """Remove an entry; return whether it was there."""
        priority, tenant = pending.request.params.priority, pending.request.tenant
        queue = self._classes.get(priority, {}).get(tenant)
        if queue is None:
            return False
        taken = queue.take(pending)
        self._drop_empty(priority, tenant, queue)
        return taken

    def remove(self, rids: set[int]) -> None:
        """Drop the samples of these requests."""
        for priority, queues in list(self._classes.items()):
            for tenant, queue in list(queues.items()):
                queue.remove(rids)
                self._drop_empty(priority, tenant, queue)

    def _queue_of(self, pending: Pending) -> CallerQueue:
        """Return the queue to which the entry belongs, a new one if there is none."""
        priority, tenant = pending.request.params.priority, pending.request.tenant
        if priority not in self._classes:
            self._classes[priority] = {}
            self._classes = dict(sorted(self._classes.items()))
        return self._classes[priority].setdefault(tenant, CallerQueue())

    def _drop_empty(self, priority: int, tenant: str, queue: CallerQueue) -> None:
        if not queue:
            del self._classes[priority][tenant]
            if not self._classes[priority]:
                del self._classes[priority]

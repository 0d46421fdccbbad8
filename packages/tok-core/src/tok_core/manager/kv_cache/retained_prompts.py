"""Keep prompts in the cache for samples that start after the prefill, as decode rows.

A sample that starts late feeds the last token of the prompt. The sample shares the full pages of all tokens before
that one, and gets one page of its own with a copy of the remaining tokens, the tail.

    prompt   ┌──────────┬──────────┬──────┐┌─┐
             │  pages, shared      │ tail ││ │ ◄ the last token: fed by the sample's first decode row
             └──────────┴──────────┴──────┘└─┘
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tok_core.manager.kv_cache.paging import Paging
from tok_core.manager.requests import Request
from tok_core.manager.sequences import State
from tok_core.messages import EMPTY, Int32, Int64


class RetainedPrompt(NamedTuple):
    """Prompt that is kept in the cache.

    node    id of the locked tree node that ends with the last of `pages`
    pages   full pages of the prompt, int32 [k]
    tail    page that holds the remaining tokens, int32 [1]; empty if there are none
    source  page, like `tail`, from which the tail is copied at the start of step `ready`, the
          first that may use the retained prompt
    """

    request: Request
    node: int
    pages: Int32
    tail: Int32
    source: Int32
    ready: int


class RetainedPrompts:
    """Retained prompts, at most one for each request with samples left to start. Each may be evicted at any time."""

    def __init__(self, paging: Paging) -> None:
        self.paging = paging
        self.tails = 0  # number of pages that are tails
        self._retained: dict[int, RetainedPrompt] = {}  # by rid

    def find(self, request: Request) -> RetainedPrompt | None:
        """Return the request's retained prompt, if there is one."""
        return self._retained.get(request.rid)

    def keep(self, request: Request, leader: int, step: int) -> None:
        """Retain the prompt of `request`, whose prefill slot `leader` finishes in `step`, if a page is free for it."""
        paging, size = self.paging, self.paging.page_size
        depth, rest = divmod(len(request.prompt) - 1, size)
        match = paging.tree.match(request.prompt[: depth * size], request.salt)
        assert request.rid not in self._retained
        if match.length < depth * size:
            return  # the tree holds another sequence's copy of pages that the leader computed too, and it is shorter
        paging.tree.lock(match.node)
        tail = source = EMPTY
        if rest:
            if not paging.evict_until_free(1):
                paging.tree.unlock(match.node)
                return
            tail, source = paging.allocator.allocate(1), paging.table.pages[leader, depth : depth + 1].copy()
            paging.copies.add_later(source, tail)
        self.tails += len(tail)
        self._retained[request.rid] = RetainedPrompt(request, match.node.id, match.pages, tail, source, step + 1)

    def start(self, retained: RetainedPrompt, samples: list[int], step: int) -> Int64:
        """Return slots for `samples`, which decode from `step` on. There must be as many free slots and pages."""
        paging, table, request = self.paging, self.paging.table, retained.request
        count = len(samples)
        slots = table.claim(request, samples, request.prompt)
        own = paging.allocator.allocate(count)
        paging.share(slots, retained.node, retained.pages)
        paging.grow(slots, own)
        if len(retained.tail):
            origin = retained.source if step == retained.ready else retained.tail
            paging.copies.add(np.repeat(origin, count), own)
        table.length[slots] = len(request.prompt) - 1
        table.state[slots] = State.DECODE
        return slots

    def drop(self, rid: int) -> None:
        """Evict the request's retained prompt, if it has one."""
        retained = self._retained.pop(rid, None)
        if retained is not None:
            self.tails -= len(retained.tail)
            self.paging.allocator.release(retained.tail)
            self.paging.tree.unlock(self.paging.tree.node(retained.node))

    def drop_all(self) -> None:
        """Evict all retained prompts."""
        for rid in list(self._retained):
            self.drop(rid)

    def held(self, priority: int) -> tuple[Int64, int]:
        """Return the nodes, int64 [n], of retained prompts of this and higher classes, and how many tails they have."""
        kept = [retained for retained in self._retained.values() if retained.request.params.priority <= priority]
        return np.array([retained.node for retained in kept], np.int64), sum(len(retained.tail) for retained in kept)

    def drop_lowest_ranked(self, below: int | None = None) -> bool:
        """Evict the prompt of lowest rank: of the lowest class, the youngest request's. Return whether there was one.

        below  evict only prompts of classes lower than this one
        """
        requests = (retained.request for retained in self._retained.values())
        lowest = max(requests, key=lambda one: (one.params.priority, one.serial), default=None)
        if lowest is None or (below is not None and lowest.params.priority <= below):
            return False
        self.drop(lowest.rid)
        return True

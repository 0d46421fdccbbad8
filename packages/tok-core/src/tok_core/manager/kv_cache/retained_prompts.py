"""Keep prompts in the cache for samples that start after the prefill, as decode rows.

Such a sample feeds the last token of the prompt. It shares the full pages of all tokens before that, and gets one page
of its own with a copy of the rest.

    prompt   ┌──────────┬──────────┬──────┐┌─┐
             │  pages, shared      │ tail ││ │ ◄ the last token: fed by the sample's first decode row
             └──────────┴──────────┴──────┘└─┘
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tok_core.manager.kv_cache.paging import Paging
from tok_core.manager.sequences import Request, State
from tok_core.messages import EMPTY, Int32, Int64


class RetainedPrompt(NamedTuple):
    """What is kept of a prompt.

    node    of the tree, locked, that ends with `pages`, int32 [k]
    tail    the page that holds the rest, int32 [1], or [0] where there is none
    source  the page, like `tail`, that it is copied from at the start of step `ready`, the first that may use the stem
    """

    request: Request
    node: int
    pages: Int32
    tail: Int32
    source: Int32
    ready: int


class RetainedPrompts:
    """At most one for each request that has samples left to start. It may be given up at any time."""

    def __init__(self, paging: Paging) -> None:
        self.paging = paging
        self.tails = 0  # pages that are tails
        self._retained: dict[int, RetainedPrompt] = {}  # by request

    def find(self, request: Request) -> RetainedPrompt | None:
        """Return the request's retained prompt, if there is one."""
        return self._retained.get(request.rid)

    def keep(self, request: Request, leader: int, step: int) -> None:
        """Keeps the prompt of `request`, which slot `leader` finishes to prefill in `step`, if there is room."""
        paging, size = self.paging, self.paging.page_size
        depth, rest = divmod(len(request.prompt) - 1, size)
        match = paging.tree.match(request.prompt[: depth * size], request.salt)
        assert request.rid not in self._retained
        if match.length < depth * size:
            return  # other sequences' pages, which the leader computed too, do not reach so far
        paging.tree.lock(match.node)
        tail = source = EMPTY
        if rest:
            if not paging.room_for(1):
                paging.tree.unlock(match.node)
                return
            tail, source = paging.allocator.allocate(1), paging.table.pages[leader, depth : depth + 1].copy()
            paging.copies.add_later(source, tail)
        self.tails += len(tail)
        self._retained[request.rid] = RetainedPrompt(request, match.node.id, match.pages, tail, source, step + 1)

    def start(self, retained: RetainedPrompt, samples: list[int], step: int) -> Int64:
        """Slots for `samples`, decoding from `step` on. There must be as many free slots and pages."""
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
        """Give up the request's retained prompt, if it has one."""
        retained = self._retained.pop(rid, None)
        if retained is not None:
            self.tails -= len(retained.tail)
            self.paging.allocator.release(retained.tail)
            self.paging.tree.unlock(self.paging.tree.node(retained.node))

    def held(self, priority: int) -> tuple[Int64, int]:
        """Return the nodes, int64 [n], where prompts of this and higher classes are kept, and the number of tails."""
        kept = [retained for retained in self._retained.values() if retained.request.params.priority <= priority]
        return np.array([retained.node for retained in kept], np.int64), sum(len(retained.tail) for retained in kept)

    def drop_youngest(self, below: int | None = None) -> bool:
        """Give up the prompt of the last request of the lowest class; returns whether there was one.

        below  only of classes lower than this one
        """
        requests = (retained.request for retained in self._retained.values())
        last = max(requests, key=lambda one: (one.params.priority, one.arrival), default=None)
        if last is None or (below is not None and last.params.priority <= below):
            return False
        self.drop(last.rid)
        return True

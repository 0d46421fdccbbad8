"""Paging: which pages each sequence holds, which it shares through the prefix tree, and what the worker is told."""

from __future__ import annotations

import numpy as np

from tok_core.manager.pages import PageAllocator
from tok_core.manager.prefix_tree import PrefixTree
from tok_core.manager.sequences import SequenceTable
from tok_core.messages import Int32


class Paging:
    """Pages of the sequences in `table`. A page is free, the tree's, or one slot's own.

    A page may be given away in the very step after its last use was scheduled: the worker carries steps out in order.
    """

    def __init__(self, table: SequenceTable, num_pages: int) -> None:
        self.table = table
        self.page_size = table.page_size
        self.num_pages = num_pages
        self.allocator = PageAllocator(num_pages)
        self.tree = PrefixTree(table.page_size)
        self._changes: list[tuple[Int32, Int32, Int32]] = []

    @property
    def locked(self) -> int:
        """Tree pages that running sequences hold."""
        return self.tree.pages - self.tree.evictable

    @property
    def used(self) -> int:
        """Pages that are neither free nor merely cached."""
        return self.num_pages - self.allocator.free - self.tree.evictable

    def room_for(self, count: int) -> bool:
        """Whether `count` pages are free, once the least recently used cached ones have been given up for them."""
        short = count - self.allocator.free
        if short > 0:
            self.allocator.release(self.tree.evict(short))
        return self.allocator.free >= count

    def grow(self, slots: np.ndarray) -> None:
        """One more page for each of `slots`; there must be room."""
        index = self.table.num_pages[slots]
        pages = self.allocator.allocate(len(slots))
        self._set(slots, index, pages)
        self.table.num_pages[slots] = index + 1

    def missing(self, slot: int, tokens: int) -> int:
        """How many pages `slot` lacks to hold `tokens`."""
        return max(0, -(-tokens // self.page_size) - int(self.table.num_pages[slot]))

    def reserve(self, slot: int, tokens: int) -> None:
        """Gives `slot` the pages it lacks to hold `tokens`; there must be room."""
        count = self.missing(slot, tokens)
        if count:
            first = int(self.table.num_pages[slot])
            self._set_range(slot, first, self.allocator.allocate(count))
            self.table.num_pages[slot] = first + count

    def start(self, slot: int) -> None:
        """A slot begins at the root of the tree."""
        self.table.node[slot] = self.tree.root.id
        self.tree.lock(self.tree.root)

    def adopt(self, slot: int) -> None:
        """Takes over whatever more of the slot's prompt the tree holds by now; its last token is always computed."""
        table = self.table
        shared, page_size = int(table.num_shared[slot]), self.page_size
        limit = (int(table.target[slot]) - 1) // page_size * page_size
        if limit <= shared * page_size:
            return
        match = self.tree.match(table.tokens[slot, :limit])
        depth = match.length // page_size
        if depth <= shared:
            return
        held = int(table.num_pages[slot])
        self._hold(slot, match.node.id)
        self.allocator.release(table.pages[slot, shared : min(depth, held)].copy())
        self._set_range(slot, shared, match.pages[shared:depth])
        table.num_pages[slot] = max(depth, held)
        table.num_shared[slot] = depth
        table.length[slot] = max(int(table.length[slot]), match.length)

    def publish(self, slot: int) -> None:
        """Lets other sequences share the full pages of what `slot` has prefilled, from the next chunk on.

        A page whose tokens the tree has already stays the slot's own: it may be being written in this very step.
        """
        table, page_size = self.table, self.page_size
        shared, depth = int(table.num_shared[slot]), int(table.length[slot]) // page_size
        if depth <= shared:
            return
        if self.tree.match(table.tokens[slot, : depth * page_size]).length > shared * page_size:
            return
        self._hold(slot, self._extend(slot, shared, depth))
        table.num_shared[slot] = depth

    def surrender(self, slot: int) -> None:
        """The slot gives up all pages; full pages of known tokens stay cached."""
        table = self.table
        shared, held = int(table.num_shared[slot]), int(table.num_pages[slot])
        depth = min(int(table.length[slot]), int(table.known[slot])) // self.page_size
        if depth > shared:
            self._extend(slot, shared, depth)
        self.allocator.release(table.pages[slot, max(depth, shared) : held].copy())
        self.tree.unlock(self.tree.node(int(table.node[slot])))
        table.num_pages[slot] = table.num_shared[slot] = 0

    def fork_cost(self, leader: int) -> int:
        """Pages that each fork of `leader` needs at once."""
        return int(self.table.num_pages[leader] - self.table.num_shared[leader])

    def fork(self, leader: int, slot: int) -> tuple[Int32, Int32]:
        """`slot` shares the leader's tree pages and gets its own for the rest; returns what to copy, from and to."""
        table = self.table
        shared, held = int(table.num_shared[leader]), int(table.num_pages[leader])
        node = self.tree.node(int(table.node[leader]))
        self.tree.lock(node)
        table.node[slot] = node.id
        own = self.allocator.allocate(held - shared)
        source = table.pages[leader, shared:held].copy()
        self._set_range(slot, 0, np.concatenate((table.pages[leader, :shared], own)))
        table.num_pages[slot], table.num_shared[slot] = held, shared
        return source, own

    def take_changes(self) -> tuple[Int32, Int32, Int32]:
        """Page table entries set since the last call, each once: slots, indices, page ids."""
        if not self._changes:
            return _NONE
        slot, index, page = (np.concatenate(part) for part in zip(*self._changes, strict=True))
        self._changes = []
        key = slot.astype(np.int64) * self.table.pages.shape[1] + index
        _, last = np.unique(key[::-1], return_index=True)
        if len(last) < len(key):  # a slot that changed hands within the step: the last entry counts
            keep = np.sort(len(key) - 1 - last)
            slot, index, page = slot[keep], index[keep], page[keep]
        return slot, index, page

    def _extend(self, slot: int, shared: int, depth: int) -> int:
        """Gives the slot's pages `[shared, depth)` to the tree; returns the node below which they now stand."""
        table, size = self.table, self.page_size
        node = self.tree.node(int(table.node[slot]))
        tokens = table.tokens[slot, shared * size : depth * size].copy()
        added = self.tree.extend(node, tokens, table.pages[slot, shared:depth].copy())
        self.allocator.release(added.duplicates)
        return added.node.id

    def _hold(self, slot: int, node_id: int) -> None:
        old = int(self.table.node[slot])
        if old != node_id:
            self.tree.lock(self.tree.node(node_id))
            self.tree.unlock(self.tree.node(old))
            self.table.node[slot] = node_id

    def _set_range(self, slot: int, first: int, pages: Int32) -> None:
        index = np.arange(first, first + len(pages), dtype=np.int32)
        self._set(np.full(len(pages), slot, np.int32), index, pages)

    def _set(self, slots: np.ndarray, index: Int32, pages: Int32) -> None:
        self.table.pages[slots, index] = pages
        self._changes.append((slots.astype(np.int32), index, pages))


_EMPTY = np.empty(0, np.int32)
_NONE = (_EMPTY, _EMPTY, _EMPTY)

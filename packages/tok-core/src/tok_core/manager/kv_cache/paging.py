"""Paging: which pages each sequence holds, which it shares through the prefix tree, and what the worker is told."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

import numpy as np

from tok_core.manager.kv_cache.page_allocator import PageAllocator
from tok_core.manager.kv_cache.page_copies import PageCopies
from tok_core.manager.kv_cache.prefix_tree import PrefixTree
from tok_core.manager.kv_cache.tree_nodes import Insertion
from tok_core.manager.sequences import SequenceTable
from tok_core.messages import EMPTY, Int32, Int64, SharedPages

MANY = 4  # slots of one node whose pages go to the tree faster at once than one by one
AT_ONCE = 1 << 14  # page table entries of slots that begin alike from which on the worker is told the pages once


class Paging:
    """Pages of the sequences in `table`. A page is free, the tree's, one slot's own, or the tail of a stem.

    A page may be given away in the very step after its last use was scheduled: the worker carries steps out in order.

    at_once  as AT_ONCE
    """

    def __init__(self, table: SequenceTable, num_pages: int) -> None:
        self.table = table
        self.page_size = table.page_size
        self.num_pages = num_pages
        self.allocator = PageAllocator(num_pages)
        self.copies = PageCopies(self.allocator)
        self.tree = PrefixTree(table.page_size)
        self.at_once = AT_ONCE
        self._shared: list[SharedPages] = []
        self._changes: list[tuple[Int64, Int64]] = []  # slots and indices
        self._runs: list[tuple[int, int, int]] = []  # changes of one slot each: first index, how many

    @property
    def locked(self) -> int:
        """Tree pages that running sequences hold."""
        return self.tree.pages - self.tree.evictable

    @property
    def available(self) -> int:
        """Pages that are free or merely cached."""
        return self.allocator.free + self.tree.evictable

    @property
    def used(self) -> int:
        """Pages that are neither free nor merely cached."""
        return self.num_pages - self.available

    def depth_in_common(self, slots: Int64) -> Int64:
        """Pages at the beginning of each slot's sequence that other slots or retained prompts hold, too; int64 [n]."""
        table, tree = self.table, self.tree
        node = table.node[slots]
        rows = tree.alone[node].nonzero()[0]
        while len(rows):
            node[rows] = tree.parent[node[rows]]
            rows = rows[tree.alone[node[rows]] & (node[rows] != tree.root.id)]
        depth: Int64 = np.where(tree.alone[node], 0, tree.depth[node]).astype(np.int64)
        return np.minimum(depth, table.num_shared[slots], dtype=np.int64)

    def room_for(self, count: int) -> bool:
        """Whether `count` pages are free, once the least recently used cached ones have been given up for them."""
        short = count - self.allocator.free
        if short > 0:
            self.allocator.release(self.tree.evict(short))
        return self.allocator.free >= count

    def grow(self, slots: Int64, pages: Int32) -> None:
        """One more page for each of `slots`."""
        index = self.table.num_pages[slots].astype(np.int64)
        self.table.pages[slots, index] = pages
        self.table.num_pages[slots] = index + 1
        self._changes.append((slots, index))

    def missing(self, slot: int, tokens: int) -> int:
        """How many pages `slot` lacks to hold `tokens`."""
        return max(0, -(-tokens // self.page_size) - int(self.table.num_pages[slot]))

    def reserve(self, slot: int, tokens: int) -> None:
        """Gives `slot` the pages it lacks to hold `tokens`; there must be room."""
        count = self.missing(slot, tokens)
        if count:
            first = int(self.table.num_pages[slot])
            self._set_one(slot, first, self.allocator.allocate(count))
            self.table.num_pages[slot] = first + count

    def share(self, slots: Int64, node_id: int, pages: Int32) -> None:
        """New slots begin with the tree's `pages` down to a node."""
        self.tree.lock(self.tree.node(node_id), len(slots))
        self.table.node[slots] = node_id
        if len(slots) * len(pages) < self.at_once:
            self._set(slots, 0, pages)
        else:
            self.table.pages[slots, : len(pages)] = pages
            self._shared.append(SharedPages(slots.astype(np.int32), pages))
        self.table.num_pages[slots] = self.table.num_shared[slots] = len(pages)

    def start(self, slot: int) -> None:
        """A slot that has no pages yet begins at the root of the tree."""
        self.tree.lock(self.tree.root)
        self.table.node[slot] = self.tree.root.id

    def adopt(self, slot: int) -> None:
        """Takes over whatever more of the slot's prompt the tree holds by now; its last token is always computed."""
        table = self.table
        shared, page_size = int(table.num_shared[slot]), self.page_size
        limit = (int(table.target[slot]) - 1) // page_size * page_size
        if limit <= shared * page_size:
            return
        match = self.tree.match(table.tokens[slot, :limit], table.salt[slot])
        depth = match.length // page_size
        if depth <= shared:
            return
        held = int(table.num_pages[slot])
        self._hold(slot, match.node.id)
        if held > shared:
            self.allocator.release(table.pages[slot, shared : min(depth, held)].copy())
        self._set_one(slot, shared, match.pages[shared:depth])
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
        node = self.tree.node(int(table.node[slot]))  # it ends with the slot's shared pages
        page = table.tokens[slot, shared * page_size : (shared + 1) * page_size]
        if self.tree.continues(node, page, table.salt[slot]):
            return
        added = self._extend(slot, shared, depth)
        self.allocator.release(added.duplicates)
        self._hold(slot, added.node.id)
        table.num_shared[slot] = depth

    def surrender(self, slots: Int64) -> None:
        """The slots give up all pages; full pages of known tokens stay cached."""
        table, tree = self.table, self.tree
        shared, held, node = table.num_shared[slots], table.num_pages[slots], table.node[slots]
        depth = np.maximum(np.minimum(table.length[slots], table.known[slots]) // self.page_size, shared)
        holders = Counter(node.tolist())
        rest = _one_by_one(np.stack((slots, depth, held - depth), axis=1)[held > depth])
        back = [table.pages[rest], *self._leave(slots[depth > shared], holders)]
        for node_id, count in holders.items():
            tree.unlock(tree.node(node_id), count)
        self.allocator.release(np.concatenate(back))
        table.num_pages[slots] = table.num_shared[slots] = 0

    def fork_cost(self, leader: int) -> int:
        """Pages that each fork of `leader` needs at once."""
        return int(self.table.num_pages[leader] - self.table.num_shared[leader])

    def fork(self, leader: int, slots: Int64) -> None:
        """New slots share the leader's tree pages; they get copies of the others, as this step leaves them."""
        table = self.table
        shared, held = int(table.num_shared[leader]), int(table.num_pages[leader])
        self.share(slots, int(table.node[leader]), table.pages[leader, :shared].copy())
        if held > shared:
            own = self.allocator.allocate((held - shared) * len(slots))
            self._set(slots, shared, own.reshape(len(slots), -1))
            self.copies.add_later(np.tile(table.pages[leader, shared:held], len(slots)), own)
        table.num_pages[slots] = held

    def take_changes(self) -> tuple[list[SharedPages], Int32, Int32, Int32]:
        """Page table entries set since the last call: pages shared by many, then slots, indices, page ids of others.

        One of the others that was set several times comes as often, each time with the page that is there now; that
        also makes up for what has changed since of those shared.
        """
        shared, self._shared = self._shared, []
        if self._runs:
            self._changes.append(_one_by_one(np.array(self._runs)))
            self._runs = []
        if not self._changes:
            return shared, EMPTY, EMPTY, EMPTY
        slot, index = (np.concatenate(part) for part in zip(*self._changes, strict=True))
        self._changes = []
        return shared, slot.astype(np.int32), index.astype(np.int32), self.table.pages[slot, index]

    def _extend(self, slot: int, shared: int, depth: int) -> Insertion:
        """Gives the slot's pages `[shared, depth)` to the tree."""
        table, size = self.table, self.page_size
        node = self.tree.node(int(table.node[slot]))
        tokens, pages = table.tokens[slot, shared * size : depth * size], table.pages[slot, shared:depth]
        return self.tree.extend(node, tokens, pages, table.salt[slot])

    def _leave(self, slots: Int64, holders: Mapping[int, int]) -> list[Int32]:
        """Gives the slots' full pages to the tree, those of a node with many `holders` at once; returns duplicates."""
        table, size, back = self.table, self.page_size, []
        depth = np.minimum(table.length[slots], table.known[slots]) // size
        together: defaultdict[tuple[int, int, int, bytes], list[int]] = defaultdict(list)
        columns = slots, table.node[slots], table.num_shared[slots], depth
        for slot, node_id, first, end in zip(*(column.tolist() for column in columns), strict=True):
            if holders[node_id] >= MANY:
                together[node_id, first, end, table.salt[slot]].append(slot)
            elif len(duplicates := self._extend(slot, first, end).duplicates):
                back.append(duplicates)
        for (node_id, first, end, salt), some in together.items():
            rows = np.array(some)[:, None]
            tokens = table.tokens[rows, np.arange(first * size, end * size)]
            pages = table.pages[rows, np.arange(first, end)]
            back.append(self.tree.extend_each(self.tree.node(node_id), tokens, pages, salt))
        return back

    def _hold(self, slot: int, node_id: int) -> None:
        old = int(self.table.node[slot])
        if old != node_id:
            self.tree.lock(self.tree.node(node_id))
            self.tree.unlock(self.tree.node(old))
            self.table.node[slot] = node_id

    def _set_one(self, slot: int, first: int, pages: Int32) -> None:
        """Page table entries of `slot` from `first` on."""
        count = len(pages)
        self.table.pages[slot, first : first + count] = pages
        self._runs.append((slot, first, count))

    def _set(self, slots: Int64, first: int, pages: Int32) -> None:
        """Page table entries from `first` on: the same for all of `slots`, or with a row for each."""
        count = pages.shape[-1]
        if count:
            self.table.pages[slots, first : first + count] = pages
            self._changes.append((np.repeat(slots, count), np.tile(np.arange(first, first + count), len(slots))))


def _one_by_one(runs: Int64) -> tuple[Int64, Int64]:
    """The slots and indices of `runs`, int64 [n, 3] of slot, first index and count."""
    slot, first, count = runs.T
    before = np.cumsum(count) - count
    return np.repeat(slot, count), np.arange(count.sum()) + np.repeat(first - before, count)

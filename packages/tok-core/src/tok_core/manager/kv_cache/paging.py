"""Track which pages each sequence holds and shares through the prefix tree, and what of it changes for the worker."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

import numpy as np

from tok_core.manager.kv_cache.page_allocator import PageAllocator, PageCopies
from tok_core.manager.kv_cache.prefix_tree import PrefixTree
from tok_core.manager.kv_cache.tree_nodes import Insertion, Node
from tok_core.manager.sequences import SequenceTable
from tok_core.messages import EMPTY, Int32, Int64, SharedPages

MIN_TOGETHER_SLOTS = 4  # slots of one node from which on inserting their pages into the tree together is faster
MIN_SHARED_ENTRIES = 1 << 14  # page table entries of slots with common pages from which on these are sent once


class Paging:
    """Pages of the sequences in `table`. A page is free, the tree's, one slot's own, or the tail of a retained prompt.

    A page may be reallocated in the very step after its last use was scheduled: the worker executes steps in order.
    """

    def __init__(self, table: SequenceTable, num_pages: int) -> None:
        self.table = table
        self.page_size = table.page_size
        self.num_pages = num_pages
        self.allocator = PageAllocator(num_pages)
        self.copies = PageCopies(self.allocator)
        self.tree = PrefixTree(table.page_size)
        self.min_shared_entries = MIN_SHARED_ENTRIES
        self._shared: list[SharedPages] = []
        self._changes: list[tuple[Int64, Int64]] = []  # slots and indices
        self._runs: list[tuple[int, int, int]] = []  # changes of one slot each: slot, first index, count

    @property
    def locked(self) -> int:
        """Return the number of pages of the tree that are locked."""
        return self.tree.pages - self.tree.evictable

    @property
    def cached(self) -> int:
        """Return the number of pages that are only cached and can be evicted."""
        return self.tree.evictable

    @property
    def available(self) -> int:
        """Return the number of pages that are free or can be evicted."""
        return self.allocator.free + self.tree.evictable

    @property
    def used(self) -> int:
        """Return the number of pages that are neither free nor evictable."""
        return self.num_pages - self.available

    def depth_in_common(self, slots: Int64) -> Int64:
        """Return how many leading pages of each slot other slots or retained prompts hold, too; int64 [n]."""
        table, tree = self.table, self.tree
        node = table.node[slots].astype(np.int64)  # NumPy indexes by int64 in half the time
        rows = tree.single_lock[node].nonzero()[0]
        while len(rows):
            node[rows] = tree.parent[node[rows]]
            rows = rows[tree.single_lock[node[rows]] & (node[rows] != tree.root.id)]
        depth: Int64 = np.where(tree.single_lock[node], 0, tree.depth[node])
        return np.minimum(depth, table.num_shared[slots])

    def evict_until_free(self, count: int) -> bool:
        """Evict the least recently used cached pages until `count` pages are free; return whether they are."""
        short = count - self.allocator.free
        if short > 0:
            self.allocator.release(self.tree.evict(short))
        return self.allocator.free >= count

    def grow(self, slots: Int64, pages: Int32) -> None:
        """Append one of `pages` to each of `slots`."""
        index = self.table.num_pages[slots].astype(np.int64)
        self.table.pages[slots, index] = pages
        self.table.num_pages[slots] = index + 1
        self._changes.append((slots, index))

    def missing(self, slot: int, tokens: int) -> int:
        """Return how many pages `slot` lacks to hold `tokens` tokens."""
        return max(0, -(-tokens // self.page_size) - int(self.table.num_pages[slot]))

    def reserve(self, slot: int, tokens: int) -> None:
        """Allocate the pages that `slot` lacks to hold `tokens` tokens; they must be free."""
        count = self.missing(slot, tokens)
        if count:
            first = int(self.table.num_pages[slot])
            self._set_one(slot, first, self.allocator.allocate(count))
            self.table.num_pages[slot] = first + count

    def share(self, slots: Int64, node_id: int, pages: Int32) -> None:
        """Let new slots begin with the tree's `pages` down to a node, which each of them locks."""
        self.tree.lock(self.tree.node(node_id), len(slots))
        self.table.node[slots] = node_id
        if len(slots) * len(pages) < self.min_shared_entries:
            self._set(slots, 0, pages)
        else:
            self.table.pages[slots, : len(pages)] = pages
            self._shared.append(SharedPages(slots.astype(np.int32), pages))
        self.table.num_pages[slots] = self.table.num_shared[slots] = len(pages)

    def start(self, slot: int) -> None:
        """Let a slot that has no pages yet begin at the root of the tree."""
        self.tree.lock(self.tree.root)
        self.table.node[slot] = self.tree.root.id

    def adopt(self, slot: int) -> None:
        """Share pages of the slot's further tokens that the tree holds by now; the last token is always computed."""
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
        """Insert the full pages that `slot` has prefilled into the tree; others share them from their next chunk on.

        A page whose tokens the tree has already stays the slot's own, since this very step may be writing it.
        """
        table, page_size = self.table, self.page_size
        shared, depth = int(table.num_shared[slot]), int(table.length[slot]) // page_size
        if depth <= shared:
            return
        node = self.tree.node(int(table.node[slot]))  # it ends with the slot's shared pages
        page = table.tokens[slot, shared * page_size : (shared + 1) * page_size]
        if self.tree.continues(node, page, table.salt[slot]):
            return
        added = self._extend(slot, node, shared, depth)
        self.allocator.release(added.duplicates)
        self._hold(slot, added.node.id)
        table.num_shared[slot] = depth

    def release_all_pages(self, slots: Int64) -> None:
        """Release all pages of the slots; full pages of known tokens stay cached in the tree."""
        table, tree = self.table, self.tree
        shared, held, node = table.num_shared[slots], table.num_pages[slots], table.node[slots]
        depth = np.maximum(np.minimum(table.length[slots], table.known[slots]) // self.page_size, shared)
        holders = Counter(node.tolist())
        rest = _expand_runs(np.stack((slots, depth, held - depth), axis=1)[held > depth])
        back = [table.pages[rest], *self._leave(slots[depth > shared], holders)]
        for node_id, count in holders.items():
            tree.unlock(tree.node(node_id), count)
        self.allocator.release(np.concatenate(back))
        table.num_pages[slots] = table.num_shared[slots] = 0

    def fork_cost(self, leader: int) -> int:
        """Return how many pages each fork of `leader` needs at once."""
        return int(self.table.num_pages[leader] - self.table.num_shared[leader])

    def fork(self, leader: int, slots: Int64) -> None:
        """Let new slots share the leader's tree pages, and give them copies of the others, as this step leaves them."""
        table = self.table
        shared, held = int(table.num_shared[leader]), int(table.num_pages[leader])
        self.share(slots, int(table.node[leader]), table.pages[leader, :shared].copy())
        if held > shared:
            own = self.allocator.allocate((held - shared) * len(slots))
            self._set(slots, shared, own.reshape(len(slots), -1))
            self.copies.add_later(np.tile(table.pages[leader, shared:held], len(slots)), own)
        table.num_pages[slots] = held

    def take_changes(self) -> tuple[list[SharedPages], Int32, Int32, Int32]:
        """Return the page table entries set since the last call.

        First come pages shared by many slots, then slots, indices and page ids of other entries. An entry of the second
        kind that was set several times occurs as often, each time with its present page. So it also corrects entries of
        shared pages that have changed since.
        """
        shared, self._shared = self._shared, []
        if self._runs:
            self._changes.append(_expand_runs(np.array(self._runs)))
            self._runs = []
        if not self._changes:
            return shared, EMPTY, EMPTY, EMPTY
        slot, index = (np.concatenate(part) for part in zip(*self._changes, strict=True))
        self._changes = []
        return shared, slot.astype(np.int32), index.astype(np.int32), self.table.pages[slot, index]

    def _extend(self, slot: int, node: Node, shared: int, depth: int) -> Insertion:
        """Hand the slot's pages `[shared, depth)`, which follow on its `node`, over to the tree."""
        table, size = self.table, self.page_size
        tokens, pages = table.tokens[slot, shared * size : depth * size], table.pages[slot, shared:depth]
        return self.tree.extend(node, tokens, pages, table.salt[slot])

    def _leave(self, slots: Int64, holders: Mapping[int, int]) -> list[Int32]:
        """Hand the slots' full pages over to the tree, in one call per node with many `holders`; return duplicates."""
        table, size, back = self.table, self.page_size, []
        depth = np.minimum(table.length[slots], table.known[slots]) // size
        together: defaultdict[tuple[int, int, int, bytes], list[int]] = defaultdict(list)
        columns = slots, table.node[slots], table.num_shared[slots], depth
        for slot, node_id, first, end in zip(*(column.tolist() for column in columns), strict=True):
            if holders[node_id] >= MIN_TOGETHER_SLOTS:
                together[node_id, first, end, table.salt[slot]].append(slot)
            elif len(duplicates := self._extend(slot, self.tree.node(node_id), first, end).duplicates):
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
        """Set page table entries of `slot` from index `first` on."""
        count = len(pages)
        self.table.pages[slot, first : first + count] = pages
        self._runs.append((slot, first, count))

    def _set(self, slots: Int64, first: int, pages: Int32) -> None:
        """Set page table entries from index `first` on: the same for all of `slots`, or one row for each."""
        count = pages.shape[-1]
        if count:
            self.table.pages[slots, first : first + count] = pages
            self._changes.append((np.repeat(slots, count), np.tile(np.arange(first, first + count), len(slots))))


def _expand_runs(runs: Int64) -> tuple[Int64, Int64]:
    """Expand `runs`, int64 [n, 3] of slot, first index and count, to the slot and index of each entry.

    [[7, 2, 3]] gives the slots [7, 7, 7] and the indices [2, 3, 4].
    """
    slot, first, count = runs.T
    before = np.cumsum(count) - count
    return np.repeat(slot, count), np.arange(count.sum()) + np.repeat(first - before, count)

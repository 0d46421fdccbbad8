"""Cache KV pages in a path-compressed radix tree over whole pages of tokens, evicted in order of last use.

The tree owns the pages in it. A lock on a node protects the node and all its ancestors from eviction. Every holder of
pages of the tree has a lock on the node that these pages end with. The id and the locks of a split node stay with its
lower part, which ends where the whole node did, so the node ids of holders stay valid.

Prompts with different salts share no page: the root finds its children by the salt followed by the tokens of their
first page. All salts have the same length, except the empty one.
"""

from __future__ import annotations

from heapq import heappop, heappush, heapreplace

import numpy as np

from tok_core.manager.kv_cache.tree_nodes import Insertion, LeafBatch, Match, Node, head
from tok_core.messages import EMPTY, Int32, Int64


class PrefixTree:
    """Radix tree with pages of `page_size` tokens. Matching and inserting lock nothing; both count as use.

    pages        number of pages in the tree
    evictable    number of pages of nodes without locks: all of them can be evicted
    single_lock  bool by node id: exactly one lock is on the node or below it
    parent       int64 by node id: the parent's id; the root's is its own
    depth        int64 by node id: the node's depth
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._width = page_size * 4  # bytes of a page's tokens
        self.root = Node(0, None, EMPTY, EMPTY, b"")
        self.pages = 0
        self.evictable = 0
        self.single_lock = np.zeros(64, np.bool_)
        self.parent: Int64 = np.zeros(64, np.int64)
        self.depth: Int64 = np.zeros(64, np.int64)
        self._nodes: list[Node | None] = [self.root]
        self._free_ids: list[int] = []
        self._clock = 0
        # Unlocked leaves by time of last use: at most one entry per node, and one entry per leaf batch, whose number is
        # below 0. An entry's time may lag behind its node's. Times only grow, so it is a lower bound, and is corrected
        # when the entry comes to the top.
        self._queue: list[tuple[int, int]] = []
        self._leaves: dict[int, LeafBatch] = {}  # by number

    def node(self, node_id: int) -> Node:
        """Return the node that has `node_id` now."""
        node = self._nodes[node_id]
        assert node is not None, f"node {node_id} is gone"
        return node

    def match(self, tokens: Int32, salt: bytes = b"") -> Match:
        """Return the longest prefix of `tokens`, int32 [n], cached in whole pages. Split a node that it ends within."""
        node, pages = self._descend(self.root, np.asarray(tokens, np.int32).tobytes(), salt)
        self._touch(node)
        return Match(node, pages, len(pages) * self.page_size)

    def depths(self, tokens: Int32, salt: bytes) -> tuple[int, int]:
        """Return how many leading pages of `tokens` are locked, and how many are cached.

        The lookup does not count as use and splits no node.
        """
        data, width, node, at, locked = tokens.tobytes(), self._width, self.root, 0, 0
        whole = len(data) // width * width
        while at < whole:
            child = self._child(node, (b"" if at else salt) + data[at : at + width])
            if child is None:
                break
            common = self._common(child, data, at)
            at += common * width
            if child.locks:  # then its ancestors have locks, too
                locked = at
            if common < len(child.pages):
                break
            node = child
        return locked // width, at // width

    def pages_down_to(self, nodes: Int64) -> int:
        """Return how many pages are on the paths from the root to the nodes, int64 [n], each counted once."""
        seen = np.zeros(len(self.parent), np.bool_)
        while len(nodes := np.unique(nodes[~seen[nodes]])):
            seen[nodes] = True
            nodes = self.parent[nodes]
        nodes = seen.nonzero()[0]
        return int((self.depth[nodes] - self.depth[self.parent[nodes]]).sum())

    def continues(self, node: Node, tokens: Int32, salt: bytes) -> bool:
        """Return whether a page of `tokens`, int32 [page_size], follows on `node`; the lookup does not count as use."""
        return bool(node.children) and self._key(node, tokens.tobytes(), salt) in node.children

    def lock(self, node: Node, count: int = 1) -> None:
        """Add `count` locks to `node` and its ancestors, which protect them from eviction until `unlock`."""
        at: Node | None = node
        while at is not None:
            if not at.locks:
                self.evictable -= len(at.pages)
            at.locks += count
            self.single_lock[at.id] = at.locks == 1
            at = at.parent

    def unlock(self, node: Node, count: int = 1) -> None:
        """Remove `count` locks from `node` and its ancestors, which count as used until now."""
        self._clock += 1
        at: Node | None = node
        while at is not None:
            at.used = self._clock
            assert at.locks >= count, f"node {at.id} is unlocked more often than locked"
            at.locks -= count
            if at.locks < 2:
                self.single_lock[at.id] = at.locks == 1
            if not at.locks:
                self.evictable += len(at.pages)
            at = at.parent
        self._queue_if_evictable(node)

    def extend(self, node: Node, tokens: Int32, pages: Int32, salt: bytes = b"") -> Insertion:
        """Hand over to the tree `pages`, int32 [k], with `tokens`, int32 [k · page_size], that follow on `node`.

        The caller has a lock on `node`. If the tree already has a page of the same tokens, it keeps its own. The
        caller's page, if it is another one, is a duplicate. A leaf that only the caller holds grows in place, so that
        the chunks of a sequence form no chain of nodes.
        """
        if not len(pages) or node.parent is None or node.children or node.locks != 1:
            return self._insert_below(node, tokens, pages, salt)
        assert len(tokens) == len(pages) * self.page_size, f"{len(tokens)} tokens in {len(pages)} pages"
        node.tokens = np.concatenate((node.tokens, tokens), dtype=np.int32)
        node.pages = np.concatenate((node.pages, pages), dtype=np.int32)
        self._deepen(node, len(pages))
        self.pages += len(pages)
        return Insertion(node, EMPTY, pages)  # the caller's unlock will set the time of last use

    def extend_each(self, node: Node, tokens: Int32, pages: Int32, salt: bytes = b"") -> Int32:
        """Like `extend` for each row of `tokens`, int32 [n, k · page_size], and `pages`, int32 [n, k], on one node.

        As many holders have a lock on the node and unlock it next, so the result is the duplicates of all rows, and no
        node.
        """
        assert tokens.shape[1] == pages.shape[1] * self.page_size, f"{tokens.shape[1]} tokens in {pages.shape[1]} pages"
        keys: list[bytes] = np.ascontiguousarray(tokens[:, : self.page_size]).view(f"V{self._width}").ravel().tolist()
        if salt and node is self.root:
            keys = [salt + key for key in keys]
        if len(set(keys)) == len(keys) and node.children.keys().isdisjoint(keys):  # the common case
            self._add_leaves(node, keys, tokens, pages)
            return EMPTY
        first = dict(zip(reversed(keys), range(len(keys))[::-1], strict=True))  # first row of each key
        others = [row for row, key in enumerate(keys) if key in node.children or first[key] != row]
        fresh = np.delete(np.arange(len(keys)), others)
        if len(fresh):
            self._add_leaves(node, [keys[row] for row in fresh], tokens[fresh], pages[fresh])
        return np.concatenate([self._insert_below(node, tokens[row], pages[row], salt).duplicates for row in others])

    def evict(self, count: int) -> Int32:
        """Evict up to `count` pages, least recently used first, and return them, int32.

        A page is evicted only if no lock is on or below its node and all pages below it are gone. Leaves are trimmed
        from their tail, and only as much as is needed.
        """
        freed, left = [EMPTY], count
        while left > 0 and self._queue:
            used, node_id = self._queue[0]
            if node_id < 0:
                freed.append(self._evict_leaves(self._leaves[node_id], left))
                left -= len(freed[-1])
                continue
            node = self.node(node_id)
            if node.locks or node.children:
                heappop(self._queue)
                node.queued = False
            elif node.used != used:
                heapreplace(self._queue, (node.used, node_id))
            else:
                freed.append(node.pages[-left:][::-1])
                left -= len(freed[-1])
                self._trim(node, len(freed[-1]))
        return np.concatenate(freed)

    def _descend(self, node: Node, data: bytes, salt: bytes) -> tuple[Node, Int32]:
        """Return the node below `node` where the cached part of `data`, bytes of tokens, ends, and its pages."""
        width, at, pages = self._width, 0, list[Int32]()
        whole = len(data) // width * width
        while at < whole:
            child = self._child(node, self._key(node, data, salt, at))
            if child is None:
                break
            common = self._common(child, data, at)
            node = child if common == len(child.pages) else self._split(child, common)
            pages.append(node.pages)
            at += common * width
        if not pages:
            return node, EMPTY
        return node, pages[0] if len(pages) == 1 else np.concatenate(pages)

    def _common(self, node: Node, data: bytes, start: int) -> int:
        """Return how many of the node's pages match `data`, the bytes of tokens, from byte `start` on; at least 1."""
        if data.startswith(node.tokens.tobytes(), start):  # comparing bytes takes a tenth of the time
            return len(node.pages)
        tokens = np.frombuffer(data, np.int32, offset=start)
        length = min(len(tokens), len(node.tokens))
        differ = tokens[:length] != node.tokens[:length]
        first = int(differ.argmax())
        return (first if differ[first] else length) // self.page_size

    def _insert_below(self, node: Node, tokens: Int32, pages: Int32, salt: bytes) -> Insertion:
        assert len(tokens) == len(pages) * self.page_size, f"{len(tokens)} tokens in {len(pages)} pages"
        tokens = np.asarray(tokens, np.int32)
        data = tokens.tobytes()
        node, kept = self._descend(node, data, salt)
        known = len(kept)
        if known < len(pages):
            key = self._key(node, data, salt, known * self._width)
            node = self._add_leaf(node, tokens[known * self.page_size :], pages[known:], key)
        else:
            self._touch(node)
            self._queue_if_evictable(node)
        return Insertion(node, kept, pages)

    def _add_leaf(self, parent: Node, tokens: Int32, pages: Int32, key: bytes) -> Node:
        """Add an unlocked leaf with copies of `tokens` and `pages`."""
        node = self._add(parent, tokens.copy(), pages.copy(), key)
        self.pages += len(pages)
        self.evictable += len(pages)
        self._touch(node)
        self._queue_if_evictable(node)
        return node

    def _add(self, parent: Node, tokens: Int32, pages: Int32, key: bytes) -> Node:
        """Add a node below `parent`."""
        if not self._free_ids:
            self._free_ids.append(len(self._nodes))
            self._nodes.append(None)
        node = Node(self._free_ids.pop(), parent, tokens, pages, key)
        self._nodes[node.id] = node
        if node.id == len(self.parent):
            self.single_lock = np.concatenate((self.single_lock, self.single_lock))
            self.parent = np.concatenate((self.parent, self.parent))
            self.depth = np.concatenate((self.depth, self.depth))
        self.single_lock[node.id] = False
        self.parent[node.id] = parent.id
        self.depth[node.id] = node.depth
        parent.children[key] = node
        return node

    def _add_leaves(self, parent: Node, keys: list[bytes], tokens: Int32, pages: Int32) -> None:
        """Add unlocked leaves as one batch; their times of last use are consecutive."""
        leaves = LeafBatch(parent, keys, tokens, pages, self._clock + 1)
        self._clock += len(keys) - 1
        self._touch(parent)
        self.pages += pages.size
        self.evictable += pages.size
        number = -leaves.used  # unique, since the clock only grows
        self._leaves[number] = leaves
        heappush(self._queue, (leaves.used, number))

    def _child(self, node: Node, key: bytes) -> Node | None:
        """Return the child with this key. A leaf of a batch becomes a node of its own."""
        child = node.children.get(key)
        if not isinstance(child, LeafBatch):
            return child
        leaf = child.row(key)
        found = self._add(node, leaf.tokens.copy(), leaf.pages.copy(), key)
        found.used = leaf.used
        self._queue_if_evictable(found)
        return found

    def _evict_leaves(self, leaves: LeafBatch, count: int) -> Int32:
        """Evict and return up to `count` pages of the batch at the top of the queue.

        Return none if the queue entry is outdated, or if the next leaf, which has more pages, first becomes a node.
        """
        freed, (used, number) = EMPTY, self._queue[0]
        leaves.skip()
        if used == leaves.used + leaves.removed:
            if count >= leaves.pages.shape[1]:
                freed = leaves.leave(count // leaves.pages.shape[1])
                self.pages -= len(freed)
                self.evictable -= len(freed)
            else:
                self._child(leaves.parent, leaves.keys[leaves.removed])  # only nodes can be trimmed
            leaves.skip()
        if leaves.removed == len(leaves.keys):
            heappop(self._queue)
            del self._leaves[number]
            self._queue_if_evictable(leaves.parent)
        else:
            heapreplace(self._queue, (leaves.used + leaves.removed, number))
        return freed

    def _split(self, lower: Node, count: int) -> Node:
        """Move the first `count` pages of `lower` to a new node above it, and return that node."""
        assert lower.parent is not None
        cut = count * self.page_size
        upper = self._add(lower.parent, lower.tokens[:cut].copy(), lower.pages[:count].copy(), lower.key)
        upper.locks, upper.used = lower.locks, lower.used
        self.single_lock[upper.id] = upper.locks == 1
        self.parent[lower.id] = upper.id
        lower.parent = upper
        lower.tokens, lower.pages = lower.tokens[cut:].copy(), lower.pages[count:].copy()
        lower.key = lower.tokens[: self.page_size].tobytes()
        upper.children[lower.key] = lower
        return upper

    def _trim(self, node: Node, count: int) -> None:
        """Drop the last `count` pages of the leaf at the top of the queue; remove the leaf if none is left."""
        self.pages -= count
        self.evictable -= count
        left = len(node.pages) - count
        if not left:
            heappop(self._queue)
            self._remove(node)
            return
        node.pages = head(node.pages, left)
        node.tokens = head(node.tokens, left * self.page_size)
        self._deepen(node, -count)

    def _deepen(self, node: Node, count: int) -> None:
        node.depth += count
        self.depth[node.id] = node.depth

    def _remove(self, node: Node) -> None:
        assert node.parent is not None
        del node.parent.children[node.key]
        self._nodes[node.id] = None
        self._free_ids.append(node.id)
        self._queue_if_evictable(node.parent)

    def _touch(self, node: Node) -> None:
        self._clock += 1
        at: Node | None = node
        while at is not None:
            at.used = self._clock
            at = at.parent

    def _queue_if_evictable(self, node: Node) -> None:
        if not (node.queued or node.locks or node.children or node.parent is None):
            node.queued = True
            heappush(self._queue, (node.used, node.id))

    def _key(self, parent: Node, data: bytes, salt: bytes, start: int = 0) -> bytes:
        """Return the key by which `parent` finds a node with the tokens whose bytes are `data` from `start` on."""
        page = data[start : start + self._width]
        return salt + page if parent is self.root else page

"""Define the nodes and leaf batches of the prefix tree, and the result types of its methods."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from tok_core.messages import EMPTY, Int32


class Node:
    """Pages of one path, up to where the next path branches off or a holder's pages end.

    id        small int, reused after the node is removed
    parent    None only for the root
    key       by which the parent finds it: bytes of the tokens of its first page; below the root, preceded by the salt
    children  by key
    tokens    int32 [k · page_size]
    pages     int32 [k]
    depth     pages from the root, its own included
    locks     number of locks on it and below it
    used      logical time of the last use of it or of anything below it
    queued    whether the eviction queue has an entry for it
    """

    __slots__ = ("children", "depth", "id", "key", "locks", "pages", "parent", "queued", "tokens", "used")

    def __init__(self, node_id: int, parent: Node | None, tokens: Int32, pages: Int32, key: bytes) -> None:
        self.id = node_id
        self.parent = parent
        self.key = key
        self.children: dict[bytes, Node | LeafBatch] = {}
        self.tokens = tokens
        self.pages = pages
        self.depth: int = len(pages) + (parent.depth if parent else 0)
        self.locks = 0
        self.used = 0
        self.queued = False


class Match(NamedTuple):
    """Longest cached prefix: the node it ends with, its pages int32 [k], its length in tokens."""

    node: Node
    pages: Int32
    length: int


class Insertion(NamedTuple):
    """Result of inserting pages.

    node      node that ends with the last of them
    kept      the tree's pages for the first j of them, whose tokens it had already, int32 [j]
    inserted  the inserted pages, int32 [k]
    """

    node: Node
    kept: Int32
    inserted: Int32

    @property
    def duplicates(self) -> Int32:
        """Return the pages that the tree did not take because it had their tokens; they stay the caller's."""
        if not len(self.kept):  # the common case
            return EMPTY
        first = self.inserted[: len(self.kept)]
        duplicates: Int32 = first[first != self.kept]
        return duplicates


class Leaf(NamedTuple):
    """One leaf of a batch: views of its tokens and pages, and its logical time of last use."""

    tokens: Int32
    pages: Int32
    used: int


class LeafBatch:
    """Leaves of one parent, equally long, that were inserted together and have not been looked up since.

    Most samples of a prompt are never continued. One node for each, only to be evicted again, would be most of their
    cost. A leaf belongs to the batch as long as its parent has this object as the child for the leaf's key.

    keys    the parent's key of each leaf, in order of last use
    tokens  int32 [n, k · page_size]
    pages   int32 [n, k]
    used    logical time of the last use of the first leaf; that of each further one is later by 1
    removed  number of leading leaves that no longer belong to the batch
    """

    __slots__ = ("keys", "pages", "parent", "removed", "tokens", "used")

    def __init__(self, parent: Node, keys: Sequence[bytes], tokens: Int32, pages: Int32, used: int) -> None:
        self.parent = parent
        self.keys = keys
        self.tokens = tokens
        self.pages = pages
        self.used = used
        self.removed = 0
        parent.children.update(dict.fromkeys(keys, self))

    def row(self, key: bytes) -> Leaf:
        """Return the leaf with this key."""
        row = self.keys.index(key)
        return Leaf(self.tokens[row], self.pages[row], self.used + row)

    def leave(self, count: int) -> Int32:
        """Remove the next leaves from the parent, up to `count` or to the first that no longer belongs to the batch.

        Return their pages, the last page of each leaf first.
        """
        children, first = self.parent.children, self.removed
        for key in islice(self.keys, first, first + count):
            if children.get(key) is not self:
                break
            del children[key]
            self.removed += 1
        return self.pages[first : self.removed, ::-1].reshape(-1)

    def skip(self) -> None:
        """Skip the next leaves that no longer belong to the batch."""
        children = self.parent.children
        while self.removed < len(self.keys) and children.get(self.keys[self.removed]) is not self:
            self.removed += 1


def head(array: Int32, count: int) -> Int32:
    """Return the first `count` entries: a view, or a copy if the array behind a view is more than twice as long."""
    head = array[:count]
    return head.copy() if head.base is not None and head.base.size > 2 * count else head

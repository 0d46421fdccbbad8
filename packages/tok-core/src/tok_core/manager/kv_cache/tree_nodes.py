"""Nodes and leaf batches of the prefix tree, and the result types of its methods."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from tok_core.messages import Int32


class Node:
    """Some pages of one path, up to where the next path branches off or a holder's pages end.

    id        small int, used anew when the node is gone
    parent    None for the root alone
    key       the parent finds it by this: the bytes of its first page's tokens, below the root with a salt before them
    children  by key
    tokens    int32 [k · page_size]
    pages     int32 [k]
    depth     pages from the root, its own included
    locks     locks on it and below
    used      logical time of the last use of it or of anything below
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
    """The longest cached prefix: the node it ends with, its pages int32 [k], its length in tokens."""

    node: Node
    pages: Int32
    length: int


class Insertion(NamedTuple):
    """The places of inserted pages.

    node        ends with the last of them
    pages       the tree's page of each block, int32 [k]
    duplicates  the caller's pages that the tree did not take because it had the block; still the caller's
    """

    node: Node
    pages: Int32
    duplicates: Int32


class Leaf(NamedTuple):
    """One of many leaves: views of its tokens and pages, and when it was used."""

    tokens: Int32
    pages: Int32
    used: int


class LeafBatch:
    """Leaves of one parent, equally long, that were inserted together and that nobody has asked for since.

    Most samples of a prompt are continued by nobody: a node each, only to be evicted again, would be most of what they
    cost. A leaf is one of these as long as its parent has this object as its child.

    keys    by what the parent finds each, in order of last use
    tokens  int32 [n, k · page_size]
    pages   int32 [n, k]
    used    logical time of the last use of the first; each further one's is later by 1
    gone    so many of the first are none of these any more
    """

    __slots__ = ("gone", "keys", "pages", "parent", "tokens", "used")

    def __init__(self, parent: Node, keys: Sequence[bytes], tokens: Int32, pages: Int32, used: int) -> None:
        self.parent = parent
        self.keys = keys
        self.tokens = tokens
        self.pages = pages
        self.used = used
        self.gone = 0
        parent.children.update(dict.fromkeys(keys, self))

    def row(self, key: bytes) -> Leaf:
        """The leaf that is found by `key`."""
        row = self.keys.index(key)
        return Leaf(self.tokens[row], self.pages[row], self.used + row)

    def leave(self, count: int) -> Int32:
        """Takes the next leaves away from the parent, up to `count` or the first that is none of these any more.

        Returns their pages, the last of each leaf first.
        """
        children, first = self.parent.children, self.gone
        for key in islice(self.keys, first, first + count):
            if children.get(key) is not self:
                break
            del children[key]
            self.gone += 1
        return self.pages[first : self.gone, ::-1].reshape(-1)

    def skip(self) -> None:
        """Passes over those of the next leaves that are none of these any more."""
        children = self.parent.children
        while self.gone < len(self.keys) and children.get(self.keys[self.gone]) is not self:
            self.gone += 1

    def check(self, parent: Node, key: bytes, page_size: int) -> None:
        """Asserts what holds of a leaf that `parent` finds by `key`."""
        leaf = self.row(key)
        assert self.parent is parent
        assert self.used + self.gone <= leaf.used <= parent.used
        first_page = leaf.tokens[:page_size].tobytes()
        assert key.endswith(first_page) if parent.parent is None else key == first_page
        assert len(leaf.tokens) == len(leaf.pages) * page_size > 0


def head(array: Int32, count: int) -> Int32:
    """The first `count` entries; what they are a view of is given up once it is more than twice as long."""
    head = array[:count]
    return head.copy() if head.base is not None and head.base.size > 2 * count else head

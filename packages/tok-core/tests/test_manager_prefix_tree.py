"""The prefix tree with the page allocator behaves like a model that stores every page separately."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from support.prefix_trees import check_tree
from tok_core.manager.kv_cache.page_allocator import PageAllocator
from tok_core.manager.kv_cache.prefix_tree import PrefixTree
from tok_core.manager.kv_cache.tree_nodes import Insertion, Node
from tok_core.messages import EMPTY, Int32

PAGE = 2
NUM_PAGES = 40
Tokens = tuple[int, ...]

SHADE = 100
SALTS = (b"", b"a" * 16, b"b" * 16)


def shaded(tokens: Iterable[int], shade: int) -> Tokens:
    """Return the model's tokens for a salt: it has no salts, but uses other tokens for each."""
    return tuple(token % SHADE + SHADE * shade for token in tokens)


def shade_of(tokens: Tokens) -> int:
    return tokens[0] // SHADE if tokens else 0


def salt_of(tokens: Tokens) -> bytes:
    return SALTS[shade_of(tokens)]


def pages_of(added: Insertion) -> list[int]:
    """Return the tree's page for each inserted page."""
    return [*added.kept.tolist(), *added.inserted[len(added.kept) :].tolist()]


shades = st.integers(0, len(SALTS) - 1)
# Few distinct pages, so that paths share prefixes, branch and end inside each other.
token_lists = st.builds(shaded, st.lists(st.integers(0, 1), max_size=7 * PAGE), shades)


def paths(pages: int) -> st.SearchStrategy[Tokens]:
    """Draw the tokens of `pages` pages; the first page has more distinct values."""
    first = st.lists(st.integers(0, 3), min_size=PAGE, max_size=PAGE)
    others = st.lists(st.integers(0, 1), min_size=(pages - 1) * PAGE, max_size=(pages - 1) * PAGE)
    return st.tuples(first, others).map(lambda parts: (*parts[0], *parts[1]))


@dataclass
class Model:
    """Each cached page by the tokens from the start to its end, its time of last use, and the locked prefixes."""

    page: dict[Tokens, int]
    used: dict[Tokens, int]
    locked: list[Tokens]
    clock: int = 0

    def cached(self, tokens: Tokens) -> Tokens:
        """Return the longest prefix of whole pages that is cached."""
        end = 0
        while end + PAGE <= len(tokens) and tokens[: end + PAGE] in self.page:
            end += PAGE
        return tokens[:end]

    def touch(self, tokens: Tokens) -> None:
        self.clock += 1
        for prefix in prefixes(tokens):
            self.used[prefix] = self.clock

    def keeps(self, prefix: Tokens) -> bool:
        return any(tokens[: len(prefix)] == prefix for tokens in self.locked)

    def add(self, start: Tokens, tokens: Tokens, pages: list[int]) -> list[int]:
        """Store the pages of prefixes that are not cached yet; return the other pages."""
        own = prefixes(start + tokens)[len(start) // PAGE :]
        duplicates = [
            page for prefix, page in zip(own, pages, strict=True) if self.page.setdefault(prefix, page) != page
        ]
        self.touch(start + tokens)
        return duplicates

    def evict(self, count: int) -> list[int]:
        """Evict page by page the least recently used one that is unlocked and has no page behind it."""
        freed: list[int] = []
        while len(freed) < count:
            inner = {prefix[:-PAGE] for prefix in self.page}
            loose = [prefix for prefix in self.page if prefix not in inner and not self.keeps(prefix)]
            if not loose:
                break
            oldest = min(loose, key=lambda prefix: self.used[prefix])
            freed.append(self.page.pop(oldest))
        return freed


@dataclass
class Holder:
    """A holder of a lock on the node that `tokens` end with."""

    tokens: Tokens
    node: Node


def prefixes(tokens: Tokens) -> list[Tokens]:
    """Return the prefixes of whole pages, shortest first."""
    return [tokens[:end] for end in range(PAGE, len(tokens) + 1, PAGE)]


def array(tokens: Tokens) -> Int32:
    """Return the tokens as the tree receives them."""
    return np.array(tokens, np.int32) % SHADE


def contents(tree: PrefixTree) -> dict[Tokens, int]:
    """Return every page in the tree by the tokens, in their salt's shade, from the start to its end."""
    found: dict[Tokens, int] = {}
    stack: list[tuple[Tokens, int, Node]] = [((), 0, tree.root)]
    while stack:
        start, shade, node = stack.pop()
        whole = start + shaded(node.tokens.tolist(), shade)
        own = prefixes(whole)[len(start) // PAGE :]
        found |= dict(zip(own, node.pages.tolist(), strict=True))
        for key, child in node.children.items():
            below = SALTS.index(key[: -4 * PAGE]) if node is tree.root else shade
            if isinstance(child, Node):
                stack.append((whole, below, child))
                continue
            leaf = child.row(key)
            own = prefixes(whole + shaded(leaf.tokens.tolist(), below))[len(whole) // PAGE :]
            found |= dict(zip(own, leaf.pages.tolist(), strict=True))
    return found


class TreeMachine(RuleBasedStateMachine):
    """Holders start, extend, fork and end as sequences do; some rules evict pages."""

    holders = Bundle("holders")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(NUM_PAGES)
        self.tree = PrefixTree(PAGE)
        self.model = Model({}, {}, [])

    @rule(target=holders, tokens=token_lists)
    def start(self, tokens: Tokens) -> Holder:
        """A sequence locks the cached prefix of its prompt."""
        node = self.matched(tokens)
        self.lock(node, held := self.model.cached(tokens))
        return Holder(held, node)

    @rule(tokens=token_lists)
    def look_up(self, tokens: Tokens) -> None:
        self.matched(tokens)

    @rule(target=holders, holder=holders)
    def fork(self, holder: Holder) -> Holder:
        self.lock(holder.node, holder.tokens)
        return Holder(holder.tokens, holder.node)

    @rule(target=holders, holder=consumes(holders), more=token_lists)
    def extend(self, holder: Holder, more: Tokens) -> Holder:
        """A chunk was prefilled: its full pages go to the tree, and the lock moves down."""
        added, tokens = self.extended(holder, more)
        self.lock(added.node, tokens)
        self.unlock(holder)
        return Holder(tokens, added.node)

    @rule(holder=consumes(holders), more=token_lists)
    def end(self, holder: Holder, more: Tokens) -> None:
        """A sequence leaves its pages to the tree and ends."""
        self.extended(holder, more)
        self.unlock(holder)

    @rule(
        holder=holders,
        rows=st.integers(1, 4).flatmap(lambda k: st.lists(paths(k), min_size=2, max_size=6)),
        shade=shades,
    )
    def samples_end(self, holder: Holder, rows: list[Tokens], shade: int) -> None:
        """Samples of one prompt each leave the same number of pages to the tree and end."""
        rows = [shaded(row, shade_of(holder.tokens) if holder.tokens else shade) for row in rows]
        length = len(rows[0]) // PAGE
        pages = self.fresh(len(rows) * length)
        if pages is None:
            return
        for _ in rows:
            self.lock(holder.node, holder.tokens)
        pages = pages.reshape(len(rows), length)
        seen = {*self.model.page}
        first = [holder.tokens + row[:PAGE] for row in rows]
        known = [row for row in range(len(rows)) if first[row] in seen or first[row] in first[:row]]
        given = self.tree.extend_each(holder.node, np.array(rows, np.int32) % SHADE, pages, salt_of(rows[0]))
        expected: list[int] = []
        for row in sorted(range(len(rows)), key=lambda row: row in known):  # rows with a new first page come first
            expected += self.model.add(holder.tokens, rows[row], pages[row].tolist())
        assert given.tolist() == expected
        self.allocator.release(given)
        for _ in rows:
            self.unlock(holder)

    @rule(target=holders, holder=consumes(holders))
    def leave(self, holder: Holder) -> object:
        self.unlock(holder)
        return multiple()

    @rule(tokens=token_lists)
    def insert(self, tokens: Tokens) -> None:
        """Insert unlocked pages from the start on; the cached prefix comes with new pages, too."""
        tokens = tokens[: len(tokens) // PAGE * PAGE]
        pages = self.fresh(len(tokens) // PAGE)
        if pages is not None:
            self.added(self.tree.extend(self.tree.root, array(tokens), pages, salt_of(tokens)), (), tokens, pages)

    @rule(tokens=token_lists)
    def insert_with_the_cached_pages(self, tokens: Tokens) -> None:
        tokens = tokens[: len(tokens) // PAGE * PAGE]
        node = self.matched(tokens)
        cached = self.model.cached(tokens)
        self.lock(node, cached)
        own = self.fresh((len(tokens) - len(cached)) // PAGE)
        if own is not None:
            known = [self.model.page[prefix] for prefix in prefixes(cached)]
            pages = np.concatenate((array(tuple(known)), own))
            found = self.tree.extend(self.tree.root, array(tokens), pages, salt_of(tokens))
            added = self.added(found, (), tokens, pages)
            assert not len(added.duplicates)
        self.unlock(Holder(cached, node))

    @rule(count=st.integers(0, 12))
    def evict(self, count: int) -> None:
        freed = self.tree.evict(count)
        assert freed.tolist() == self.model.evict(count)
        self.allocator.release(freed)

    @invariant()
    def the_tree_holds_what_the_model_holds(self) -> None:
        check_tree(self.tree)
        assert contents(self.tree) == self.model.page
        assert self.allocator.free + self.tree.pages == NUM_PAGES
        loose = [prefix for prefix in self.model.page if not self.model.keeps(prefix)]
        assert self.tree.evictable == len(loose)

    def teardown(self) -> None:
        """Evict everything once nothing is locked, in the model's order; nothing is left."""
        if self.tree.root.locks:
            for tokens in list(self.model.locked):
                self.unlock(Holder(tokens, self.tree.match(array(tokens), salt_of(tokens)).node))
                self.model.touch(tokens)
        freed = self.tree.evict(NUM_PAGES + 1)
        assert freed.tolist() == self.model.evict(NUM_PAGES)
        self.allocator.release(freed)
        assert self.allocator.free == NUM_PAGES
        assert not self.tree.root.children
        check_tree(self.tree)

    def matched(self, tokens: Tokens) -> Node:
        depths = self.tree.depths(array(tokens), salt_of(tokens))
        match = self.tree.match(array(tokens), salt_of(tokens))
        cached = self.model.cached(tokens)
        self.model.touch(cached)
        assert match.length == len(cached) == match.node.depth * PAGE == depths[1] * PAGE
        assert match.pages.tolist() == [self.model.page[prefix] for prefix in prefixes(cached)]
        return match.node

    def lock(self, node: Node, tokens: Tokens) -> None:
        self.tree.lock(node)
        self.model.locked.append(tokens)

    def unlock(self, holder: Holder) -> None:
        self.tree.unlock(holder.node)
        self.model.locked.remove(holder.tokens)
        self.model.touch(holder.tokens)

    def fresh(self, count: int) -> Int32 | None:
        """Allocate pages, evicting if needed; return None if even that frees too few."""
        self.evict(max(0, count - self.allocator.free))
        return self.allocator.allocate(count) if count <= self.allocator.free else None

    def extended(self, holder: Holder, more: Tokens) -> tuple[Insertion, Tokens]:
        pages = self.fresh(len(more) // PAGE)
        more = more[: len(more) // PAGE * PAGE]
        if pages is None:
            pages, more = EMPTY, ()
        if holder.tokens:
            more = shaded(more, shade_of(holder.tokens))
        single_lock = self.model.locked.count(holder.tokens) == 1 == holder.node.locks
        leaf = single_lock and holder.tokens and not holder.node.children
        added = self.tree.extend(holder.node, array(more), pages, salt_of(more))
        assert not leaf or added.node is holder.node
        whole = holder.tokens + more
        if leaf:  # the lock is where the leaf ends now
            self.model.locked.remove(holder.tokens)
            self.model.locked.append(whole)
        self.added(added, holder.tokens, more, pages)
        if leaf:
            holder.tokens = whole
        return added, whole

    def added(self, added: Insertion, start: Tokens, tokens: Tokens, pages: Int32) -> Insertion:
        """Check that the tree took the pages it lacked, and release those it returned as duplicates."""
        whole = start + tokens
        assert added.duplicates.tolist() == self.model.add(start, tokens, pages.tolist())
        assert pages_of(added) == [self.model.page[prefix] for prefix in prefixes(whole)[len(start) // PAGE :]]
        assert added.node.depth * PAGE == len(whole)
        assert self.tree.node(added.node.id) is added.node
        self.allocator.release(added.duplicates)
        return added


TestTreeAndAllocator = TreeMachine.TestCase


def pages(first: int, count: int) -> Int32:
    return np.arange(first, first + count, dtype=np.int32)


def test_prefix_tree_shares_no_page_between_cache_salts() -> None:
    tree, salts = PrefixTree(4), [b"", *(bytes([number]) * 16 for number in range(200))]
    for number, salt in enumerate(salts):
        assert tree.depths(pages(0, 16), salt) == (0, 0)
        added = tree.extend(tree.root, pages(0, 16), own := pages(4 * number, 4), salt)
        assert pages_of(added) == tree.match(pages(0, 16), salt).pages.tolist() == own.tolist()
        assert tree.continues(tree.root, pages(0, 4), salt)
        assert not tree.continues(tree.root, pages(0, 4), b"of another " + bytes(5))
        node = tree.match(pages(0, 8), salt).node
        assert tree.continues(node, pages(8, 4), b"any, as a salt counts at the root only")
    check_tree(tree)
    assert len(tree.evict(4 * len(salts))) == 4 * len(salts)
    assert not tree.root.children
    check_tree(tree)


def test_node_split_by_a_match_keeps_id_and_locks_in_the_lower_part() -> None:
    tree = PrefixTree(4)
    node = tree.extend(tree.root, pages(0, 16), pages(0, 4)).node
    tree.lock(node)
    before = node.id
    match = tree.match(pages(0, 11))
    assert match.length == 8
    assert match.pages.tolist() == [0, 1]
    assert match.node is node.parent
    assert (node.id, node.depth, node.locks) == (before, 4, 1)
    assert (match.node.depth, match.node.locks, tree.evictable) == (2, 1, 0)
    tree.unlock(node)
    assert tree.evictable == 4
    check_tree(tree)


def test_only_a_leaf_with_a_single_lock_grows_in_place() -> None:
    tree = PrefixTree(1)
    leaf = tree.extend(tree.root, pages(0, 2), pages(0, 2)).node
    tree.lock(leaf)
    assert tree.extend(leaf, pages(2, 2), pages(2, 2)).node is leaf
    assert (leaf.depth, tree.pages, tree.evictable) == (4, 4, 0)
    tree.lock(leaf)
    child = tree.extend(leaf, pages(4, 1), pages(4, 1)).node
    assert child.parent is leaf
    assert (leaf.depth, child.depth, tree.evictable) == (4, 5, 1)
    check_tree(tree)


def test_recently_unlocked_node_is_evicted_last() -> None:
    tree = PrefixTree(1)
    first = tree.extend(tree.root, pages(0, 1), pages(0, 1)).node
    tree.lock(first)
    tree.extend(tree.root, pages(1, 1), pages(1, 1))
    tree.unlock(first)
    assert tree.evict(5).tolist() == [1, 0]


def test_leaf_batch_takes_one_eviction_queue_entry_until_matched() -> None:
    tree = PrefixTree(2)
    prompt = tree.extend(tree.root, pages(0, 2), pages(100, 1)).node
    tree.lock(prompt, 8)
    assert not len(tree.extend_each(prompt, pages(0, 32).reshape(8, 4), pages(0, 16).reshape(8, 2)))
    assert (len(tree._queue), tree.pages, tree.evictable) == (2, 17, 16)  # one entry is the prompt's
    tree.unlock(prompt, 8)
    match = tree.match(np.array([0, 1, 8, 9, 10, 11], np.int32))
    assert match.pages.tolist() == [100, 4, 5]
    assert len(tree._queue) == 3
    check_tree(tree)
    assert tree.evict(3).tolist() == [1, 0, 3]  # a leaf, and a part of the next
    check_tree(tree)
    assert tree.evict(100).tolist() == [2, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14, 5, 4, 100]
    check_tree(tree)
    assert not tree._leaves


def test_node_id_is_reused_after_eviction() -> None:
    tree = PrefixTree(1)
    for turn in range(50):
        node = tree.extend(tree.root, pages(turn, 1), pages(0, 1)).node
        assert node.id == 1
        tree.evict(1)
        with pytest.raises(AssertionError, match="node 1 is gone"):
            tree.node(1)


def test_unlock_of_an_unlocked_node_raises() -> None:
    tree = PrefixTree(1)
    with pytest.raises(AssertionError, match="more often than locked"):
        tree.unlock(tree.extend(tree.root, pages(0, 1), pages(0, 1)).node)


def test_prefix_tree_path_may_exceed_the_recursion_limit() -> None:
    count = 3000
    tree = PrefixTree(1)
    deepest = tree.extend(tree.root, pages(0, count), pages(0, count)).node
    for end in range(count - 1, 0, -1):
        tree.match(pages(0, end))
    tree.lock(deepest)
    assert (tree.evictable, len(tree.evict(count))) == (0, 0)
    tree.unlock(deepest)
    check_tree(tree)
    assert tree.evict(count).tolist() == list(range(count))[::-1]


def test_trimmed_leaf_frees_the_memory_of_its_tail() -> None:
    tree = PrefixTree(4)
    leaf = tree.extend(tree.root, pages(0, 4000), pages(0, 1000)).node
    while len(leaf.pages) > 1:
        tree.evict(1)
        for kept in (leaf.pages, leaf.tokens):
            assert kept.base is None or kept.base.size <= 2 * kept.size
    assert leaf.tokens.tolist() == [0, 1, 2, 3]


def test_eviction_queue_has_no_more_entries_than_the_tree_has_nodes() -> None:
    tree = PrefixTree(1)
    for first in range(20):
        tree.extend(tree.root, pages(first, 1), pages(first, 1))
    for turn in range(1000):
        node = tree.match(pages(turn % 20, 1)).node
        tree.lock(node)
        tree.unlock(node)
        if turn % 7 == 0:
            page = tree.evict(1)
            tree.extend(tree.root, page, page)
    check_tree(tree)
    assert len(tree._queue) == 20

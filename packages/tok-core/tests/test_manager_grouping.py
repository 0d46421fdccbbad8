"""Prefix groups against the greedy rule written plainly, and against the best grouping there is."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tok_core.manager.grouping import Groups, find_groups
from tok_core.manager.prefix_tree import Node, PrefixTree
from tok_core.messages import Int32

PAGE = 2


class Rows:
    """Sequences that hold locks in a tree, as columns; `paths` are their pages from the tree."""

    def __init__(self, prompts: Sequence[tuple[int, ...]], extra: Sequence[int]) -> None:
        self.tree = PrefixTree(PAGE)
        inserted = 0
        for prompt in prompts:
            count = len(prompt)
            pages = np.arange(inserted, inserted + count, dtype=np.int32)
            self.tree.insert(tokens(prompt), pages)
            inserted += count
        self.nodes = [self.tree.match(tokens(prompt)).node for prompt in prompts]
        for node in self.nodes:
            self.tree.lock(node)
        self.paths = [self.tree.match(tokens(prompt)).pages.tolist() for prompt in prompts]
        self.node_ids = np.array([node.id for node in self.nodes], np.int32)
        self.slots = np.arange(len(prompts), dtype=np.int32)[::-1] * 3
        self.lengths = np.array([len(p) * PAGE + e for p, e in zip(prompts, extra, strict=True)], np.int32)

    def groups(self, min_saving: int) -> Groups:
        return find_groups(self.tree, self.node_ids, self.slots, self.lengths, min_saving)


def tokens(prompt: tuple[int, ...]) -> Int32:
    """Each number is one page."""
    return np.repeat(np.array(prompt, np.int32), PAGE)


def rows(most: int, deepest: int = 8) -> st.SearchStrategy[Rows]:
    prompt = st.lists(st.integers(0, 1), max_size=deepest).map(tuple)
    row = st.tuples(prompt, st.integers(0, 5))
    return st.lists(row, min_size=1, max_size=most).map(lambda made: Rows(*map(list, zip(*made, strict=True))))


def greedy(made: Rows, min_saving: int) -> set[tuple[int, frozenset[int]]]:
    """(depth, members) of each group, by recursion over the whole tree and lists of rows."""
    found: set[tuple[int, frozenset[int]]] = set()

    def visit(node: Node) -> list[int]:
        left = [row for row, held in enumerate(made.nodes) if held is node]
        for child in node.children.values():
            left += visit(child)
        if (len(left) - 1) * node.depth <= min_saving * len(left):
            return left
        found.add((node.depth, frozenset(left)))
        return []

    visit(made.tree.root)
    return found


def members(groups: Groups, group: int) -> list[int]:
    start = groups.row_start[group]
    chosen: list[int] = groups.order[start : start + groups.row_count[group]].tolist()
    return chosen


@given(rows(most=25), st.integers(0, 4))
def test_groups_are_those_of_the_greedy_rule(made: Rows, min_saving: int) -> None:
    groups = made.groups(min_saving)
    found = [(int(end) // PAGE, frozenset(members(groups, group))) for group, end in enumerate(groups.kv_end)]
    assert len(set(found)) == len(found)
    assert set(found) == greedy(made, min_saving)


@given(rows(most=25), st.integers(0, 2))
def test_members_stand_side_by_side_and_share_all_pages_of_their_prefix(made: Rows, min_saving: int) -> None:
    groups = made.groups(min_saving)
    assert sorted(groups.order.tolist()) == list(range(len(made.nodes)))
    grouped = 0
    for group, end in enumerate(groups.kv_end):
        assert groups.row_start[group] == grouped
        rows_of_group = members(groups, group)
        grouped += len(rows_of_group)
        assert rows_of_group == sorted(rows_of_group)
        assert groups.slot[group] in made.slots[rows_of_group]
        assert len({tuple(made.paths[row][: end // PAGE]) for row in rows_of_group}) == 1
        # The token that a row decodes stands at `length`, beyond all that is shared.
        assert all(end <= made.lengths[row] for row in rows_of_group)
    alone = groups.order[grouped:].tolist()
    assert alone == sorted(alone)


@given(rows(most=6, deepest=4))
def test_greedy_groups_save_at_least_half_of_what_the_best_grouping_saves(made: Rows) -> None:
    groups = made.groups(0)
    saved = int(((groups.row_count - 1) * (groups.kv_end // PAGE)).sum())
    assert 2 * saved >= best_saving(made)


def best_saving(made: Rows) -> int:
    """Over every way of giving each row one node of its path: groups of m at depth d save (m − 1) · d pages."""
    best = 0
    for chosen in product(*(path_of(node) for node in made.nodes)):
        nodes = {node.id: node for node in chosen}
        best = max(best, sum((chosen.count(node) - 1) * node.depth for node in nodes.values()))
    return best


def path_of(node: Node) -> list[Node]:
    path = [node]
    while path[-1].parent is not None:
        path.append(path[-1].parent)
    return path


def test_samples_of_two_prompts_make_two_groups_by_default() -> None:
    prompts = [(0, 1, 2, 3), (0, 5, 6, 7)] * 4
    groups = Rows(prompts, [1] * 8).groups(1)
    assert groups.row_count.tolist() == [4, 4]
    assert groups.kv_end.tolist() == [8, 8]
    assert sorted(members(groups, 0) + members(groups, 1)) == list(range(8))
    assert {row % 2 for row in members(groups, 0)} != {row % 2 for row in members(groups, 1)}


def test_a_prefix_that_saves_less_than_merging_costs_makes_no_group() -> None:
    made = Rows([(0, 1), (0, 2), (0, 3)], [1, 1, 1])
    assert made.groups(0).kv_end.tolist() == [PAGE]
    assert len(made.groups(1).kv_end) == 0
    assert made.groups(1).order.tolist() == [0, 1, 2]


def test_rows_that_hold_nothing_of_the_tree_are_left_alone() -> None:
    tree = PrefixTree(PAGE)
    ids = np.zeros(4, np.int32)
    groups = find_groups(tree, ids, np.arange(4, dtype=np.int32), np.full(4, 9, np.int32), 0)
    assert len(groups.row_count) == 0


def test_a_deep_chain_of_holders_needs_no_recursion() -> None:
    count = 3000
    tree = PrefixTree(1)
    chain = np.arange(count, dtype=np.int32)
    tree.insert(chain, chain)
    ids = np.array([tree.match(chain[:end]).node.id for end in range(count, 0, -1)], np.int32)
    groups = find_groups(tree, ids, chain, np.arange(count, 0, -1, dtype=np.int32), 0)
    assert groups.row_count.tolist() == [2] * (count // 2)

"""Prefix groups against every grouping there is, written plainly; what is shared, and in what order rows stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tok_core.manager import branches, grouping
from tok_core.manager.cascade import best_cascade, choices
from tok_core.manager.grouping import Grouping, Groups, find_groups
from tok_core.manager.prefix_tree import Node, PrefixTree
from tok_core.messages import Int32, Int64

PAGE = 2


class Rows:
    """Sequences that hold locks in a tree, as columns; `paths` are their pages from the tree."""

    def __init__(self, prompts: Sequence[tuple[int, ...]]) -> None:
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
        self.slots = np.arange(len(prompts))[::-1] * 3

    def groups(self, merge_pages: float = 1, level_pages: float = 0) -> Groups:
        return find_groups(self.tree, self.node_ids, self.slots, merge_pages, level_pages)


def tokens(prompt: tuple[int, ...]) -> Int32:
    """Each number is one page."""
    return np.repeat(np.array(prompt, np.int32), PAGE)


def rows(most: int, deepest: int = 8) -> st.SearchStrategy[Rows]:
    prompt = st.lists(st.integers(0, 1), max_size=deepest).map(tuple)
    return st.lists(prompt, min_size=1, max_size=most).map(Rows)


@dataclass
class Group:
    """A group as its level, its rows, and the pages that they share."""

    level: int
    rows: list[int]
    start: int
    end: int


def listed(made: Rows, groups: Groups) -> list[Group]:
    found = []
    for i, level in enumerate(groups.levels):
        columns = (level.start, level.count, level.kv_start // PAGE, level.kv_end // PAGE)
        for first, count, start, end in zip(*(column.tolist() for column in columns), strict=True):
            found.append(Group(i, groups.order[first : first + count].tolist(), start, end))
    return found


def saving(made: Rows, groups: Groups, merge_pages: float) -> float:
    """Pages that are read without groups, less those that are read with them, less what merging costs."""
    found = listed(made, groups)
    return sum((len(g.rows) - 1) * (g.end - g.start) - merge_pages * len(g.rows) for g in found)


def best_saving(made: Rows, levels: int, merge_pages: float) -> float:
    """Over every choice of nodes with rows to share, and of where each one's group begins to read.

    A row is in the group of the deepest chosen node on its path, in the group above that ends where that begins, and
    so on.
    """
    nodes = {node.id: node for held in made.nodes for node in path_of(held) if node.depth}
    starts = [
        [None, *(above.depth for above in path_of(node)[1:])] if count(made, node) > 1 else [None]
        for node in nodes.values()
    ]
    best = 0.0
    for chosen in product(*starts):
        start = dict(zip(nodes, chosen, strict=True))
        best = max(best, saved_by(made, start, levels, merge_pages))
    return best


def saved_by(made: Rows, start: dict[int, int | None], levels: int, merge_pages: float) -> float:
    members = dict.fromkeys(start, 0)
    for held in made.nodes:
        links, at = 0, None
        for node in path_of(held):
            if start.get(node.id) is not None and at in (None, node.depth):
                members[node.id] += 1
                links, at = links + 1, start[node.id]
        if at or links > levels:  # nothing ends where a group begins; too deep
            return 0.0
    groups = [(members[i], made.tree.node(i).depth - begin) for i, begin in start.items() if begin is not None]
    return sum(m * pages - pages - merge_pages * m for m, pages in groups if m)


def count(made: Rows, node: Node) -> int:
    return sum(node in path_of(held) for held in made.nodes)


def path_of(node: Node) -> list[Node]:
    path = [node]
    while path[-1].parent is not None:
        path.append(path[-1].parent)
    return path


@settings(max_examples=60)
@given(rows(most=6, deepest=5), st.integers(1, 3), st.sampled_from([0, 0.25, 1, 2.5]))
def test_no_grouping_saves_more_whatever_the_number_of_levels(made: Rows, levels: int, merge_pages: float) -> None:
    found = best_cascade(branches.meet(made.tree, np.bincount(made.node_ids)), levels, merge_pages)
    assert found.saved == best_saving(made, levels, merge_pages)


@given(rows(most=30), st.sampled_from([0.25, 1, 2.5]), st.sampled_from([0, 5, 20]))
def test_groups_save_what_their_choice_promised(made: Rows, merge_pages: float, level_pages: float) -> None:
    groups = made.groups(merge_pages, level_pages)
    meeting = branches.meet(made.tree, np.bincount(made.node_ids))
    promised = [best_cascade(meeting, levels, merge_pages).saved for levels in (1, 2, 3)]
    assert saving(made, groups, merge_pages) == pytest.approx(promised[max(0, len(groups.levels) - 1)])
    for more, less in zip(promised[1 : len(groups.levels)], promised, strict=False):
        assert more - less > level_pages


@given(rows(most=30), st.sampled_from([0, 0.25, 1]), st.sampled_from([0, 5]))
def test_members_stand_side_by_side_and_share_all_pages_of_their_group(
    made: Rows, merge_pages: float, level_pages: float
) -> None:
    groups = made.groups(merge_pages, level_pages)
    assert sorted(groups.order.tolist()) == list(range(len(made.nodes)))
    covered = [0] * len(made.nodes)
    for group in listed(made, groups):
        assert len(group.rows) > 1
        for row in group.rows:
            assert covered[row] == group.start < group.end  # in one group of a level, and levels without a gap
            covered[row] = group.end
        assert len({tuple(made.paths[row][: group.end]) for row in group.rows}) == 1
    for level in groups.levels:
        for start, number, slot in zip(level.start, level.count, level.slot, strict=True):
            assert slot in made.slots[groups.order[start : start + number]]
    assert groups.rows == sum(end > 0 for end in covered)
    assert all(covered[row] for row in groups.order[: groups.rows])


def test_samples_of_two_prompts_make_two_groups_by_default() -> None:
    made = Rows([(0, 1, 2, 3), (0, 5, 6, 7)] * 4)
    found = listed(made, find_groups(made.tree, made.node_ids, made.slots))
    assert sorted(group.rows for group in found) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert {(group.level, group.start, group.end) for group in found} == {(0, 0, 4)}


def test_a_system_prompt_examples_and_questions_make_three_levels() -> None:
    system, examples = tuple(range(40)), [tuple(range(100 + 30 * i, 130 + 30 * i)) for i in range(3)]
    questions = [system + examples[i % 3] + tuple(range(1000 + 20 * i, 1020 + 20 * i)) for i in range(12)]
    made = Rows([questions[row % 12] for row in range(48)])
    found = listed(made, made.groups(level_pages=20))
    assert [(group.level, group.start, group.end, len(group.rows)) for group in found] == (
        [(0, 0, 40, 48)] + [(1, 40, 70, 16)] * 3 + [(2, 70, 90, 4)] * 12
    )
    assert [len(made.groups(level_pages=pages).levels) for pages in (40, 600)] == [2, 1]


def test_a_group_whose_rows_do_not_nest_stands_beside_the_outer_one() -> None:
    # Reading two more pages costs less than to merge the results of 40 rows twice.
    made = Rows([(0, 1, 2, 3, 4, 5)] * 40 + [(0, 1, 10 + row) for row in range(9)])
    found = listed(made, made.groups())
    assert sorted((group.level, group.start, group.end, len(group.rows)) for group in found) == [
        (0, 0, 2, 9),
        (0, 0, 6, 40),
    ]


def test_a_prefix_that_saves_less_than_merging_costs_makes_no_group() -> None:
    made = Rows([(0, 1), (0, 2), (0, 3)])
    assert [level.kv_end.tolist() for level in made.groups(0).levels] == [[PAGE]]
    assert made.groups(1).levels == []
    assert made.groups(1).order.tolist() == [0, 1, 2]


def test_rows_that_hold_nothing_of_the_tree_are_left_alone() -> None:
    groups = find_groups(PrefixTree(PAGE), np.zeros(4, np.int32), np.arange(4), 0)
    assert groups.levels == []
    assert groups.rows == 0


def chain_of_holders(count: int) -> tuple[PrefixTree, Int64]:
    """Each holds a page more than the one before; their number at each node."""
    tree, chain = PrefixTree(1), np.arange(count, dtype=np.int32)
    tree.insert(chain, chain)
    nodes = [tree.match(chain[:end]).node for end in range(count, 0, -1)]
    for node in nodes:
        tree.lock(node)
    return tree, np.bincount([node.id for node in nodes])


def test_a_deep_chain_of_holders_is_grouped_well_though_not_each_node_is_asked() -> None:
    tree, counts = chain_of_holders(3000)
    meeting = branches.meet(tree, counts)
    assert len(meeting.up) <= branches.MOST_HEIGHT + 1
    pages = 3000 * 3001 / 2
    assert best_cascade(meeting, 1, 1).saved > 0.45 * pages  # a square below a line covers half of what is there
    assert best_cascade(meeting, 3, 1).saved > 0.7 * pages


@pytest.mark.parametrize("seed", range(6))
def test_deep_random_trees_are_grouped_within_five_percent_of_the_best(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(seed)
    prompts: list[tuple[int, ...]] = [(0,)]
    while len(prompts) < 120:  # each goes on from one of the last, as turns of conversations do
        longer = prompts[int(rng.integers(max(0, len(prompts) - 6), len(prompts)))]
        prompts.append((*longer, *rng.integers(0, 99, rng.integers(1, 4)).tolist()))
    made = Rows(prompts)
    counts = np.bincount(made.node_ids)
    found = branches.meet(made.tree, counts)
    monkeypatch.setattr(branches, "MOST_HEIGHT", 1000)
    every = branches.meet(made.tree, counts)
    assert len(found.level) - 2 <= 16 < len(every.level) - 2
    assert best_cascade(found, 1, 1).saved >= 0.95 * best_cascade(every, 1, 1).saved


def test_levels_are_sought_only_where_few_choices_are_to_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Rows([(*range(40), *range(100 * row, 100 * row + 20)) for row in (1, 2, 3, 4)] * 3)
    assert len(made.groups(0.1).levels) == 2
    meeting = branches.meet(made.tree, np.bincount(made.node_ids))
    assert choices(meeting, 2) == 2 * (1 * 1 + 4 * 2)  # one node under no chain, four under none or that one
    monkeypatch.setattr(grouping, "MOST_CHOICES", 17)
    assert len(made.groups(0.1).levels) == 1


def test_groups_are_found_anew_only_when_rows_have_changed() -> None:
    made = Rows([(0, 1, 2, 3), (0, 5, 6, 7)] * 4)
    found, epochs = Grouping(made.tree), np.zeros(8, np.int64)
    first = found.find(made.slots, made.node_ids, epochs)
    # A row that is not decoding parts from a prompt inside of it: the node is split.
    made.tree.lock(made.tree.match(tokens((0, 1, 2))).node)
    assert found.find(made.slots.copy(), made.node_ids.copy(), epochs.copy()) is first
    other = made.node_ids[[1, *range(1, 8)]]
    counts = [level.count.tolist() for level in found.find(made.slots, other, epochs).levels]
    assert counts in ([[3, 5]], [[5, 3]])
    assert found.find(made.slots, made.node_ids, epochs) is not first
    assert found.find(made.slots, made.node_ids, epochs + 1) is not first
    assert found.find(made.slots[1:], made.node_ids[1:], epochs[1:]).rows == 7

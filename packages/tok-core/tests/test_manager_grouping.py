"""Prefix groups for cascade attention save as much as an exhaustive search finds; members are adjacent rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tok_core.manager.kv_cache.prefix_tree import PrefixTree
from tok_core.manager.kv_cache.tree_nodes import Node
from tok_core.manager.prefix_groups import cascade, grouping, with_drafts
from tok_core.manager.prefix_groups.cascade import COSTS, CascadeCosts, best_cascade, choices, most_saved, read_cost
from tok_core.manager.prefix_groups.grouping import Grouping, Groups, MostPagesSaved
from tok_core.messages import Int32, Int64

PAGE = 2


class Rows:
    """Sequences that lock nodes of a prefix tree, as columns; `paths` are their cached pages."""

    def __init__(self, prompts: Sequence[tuple[int, ...]]) -> None:
        self.tree = PrefixTree(PAGE)
        inserted = 0
        for prompt in prompts:
            count = len(prompt)
            pages = np.arange(inserted, inserted + count, dtype=np.int32)
            self.tree.extend(self.tree.root, tokens(prompt), pages)
            inserted += count
        self.nodes = [self.tree.match(tokens(prompt)).node for prompt in prompts]
        for node in self.nodes:
            self.tree.lock(node)
        self.paths = [self.tree.match(tokens(prompt)).pages.tolist() for prompt in prompts]
        self.node_ids = np.array([node.id for node in self.nodes], np.int32)
        self.slots = np.arange(len(prompts))[::-1] * 3

    def groups(self, member: float = 1, group: float = 0, level: float = 0, *others: float) -> Groups:
        """Choose groups by these fields of CascadeCosts."""
        return MostPagesSaved(CascadeCosts(member, group, level, *others)).choose(self.tree, self.slots, self.node_ids)


def tokens(prompt: tuple[int, ...]) -> Int32:
    """Return the tokens of a prompt in which each number is one page."""
    return np.repeat(np.array(prompt, np.int32), PAGE)


def rows(most: int, deepest: int = 8) -> st.SearchStrategy[Rows]:
    prompt = st.lists(st.integers(0, 1), max_size=deepest).map(tuple)
    return st.lists(prompt, min_size=1, max_size=most).map(Rows)


def costs(
    members: Sequence[float], levels: Sequence[float], firsts: Sequence[float] = (0,)
) -> st.SearchStrategy[CascadeCosts]:
    """Draw costs; as multiples of a quarter, and with powers of two as compute-bound rows, their sums are exact."""
    group = st.integers(0, 16).map(lambda quarters: quarters / 4)
    compute_bound = st.sampled_from([math.inf, 4, 16])
    return st.builds(
        CascadeCosts,
        st.sampled_from(members),
        st.just(0.0) | group,
        st.sampled_from(levels),
        compute_bound,
        st.sampled_from(firsts),
    )


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


def saving(made: Rows, groups: Groups, cost: CascadeCosts) -> float:
    """Return the page reads that groups save, less the costs of members and groups."""
    found = listed(made, groups)
    pages = {tuple(made.paths[g.rows[0]][: g.end]): g for g in found}
    return sum(
        group_saving(len(g.rows), sharing(made, own), above(own, pages), g.start, g.end, cost)
        for own, g in pages.items()
    )


def sharing(made: Rows, pages: tuple[int, ...]) -> int:
    return sum(tuple(path[: len(pages)]) == pages for path in made.paths)


def above(own: tuple[int, ...], pages: Iterable[tuple[int, ...]]) -> int:
    """Return how many pages the deepest group above reads, which the rows would be in without their own group."""
    return max((len(other) for other in pages if len(other) < len(own) and own[: len(other)] == other), default=0)


def group_saving(members: int, below: int, end: int, start: int, here: int, cost: CascadeCosts) -> float:
    """Return what a group of pages from `start` to `here` saves; pages before `end` are also read by the group above.

    `below`: rows that share all of the pages, whether members or not.
    """
    read = (here - end) * read_cost(below, cost) + end - start
    return float(members * ((here - start) * read_cost(1, cost) - cost.member) - read - cost.group)


def best_saving(made: Rows, levels: int, cost: CascadeCosts) -> float:
    """Return the best saving over every choice of shared nodes, and of where each node's group begins to read.

    A row is in the group of the deepest chosen node on its path, in the group above that ends where this one begins,
    and so on.
    """
    nodes = {node.id: node for held in made.nodes for node in path_of(held) if node.depth}
    starts = [
        [None, *(above.depth for above in path_of(node)[1:])] if count(made, node) > 1 else [None]
        for node in nodes.values()
    ]
    best = 0.0
    for chosen in product(*starts):
        start = dict(zip(nodes, chosen, strict=True))
        best = max(best, saved_by(made, start, levels, cost))
    return best


def saved_by(made: Rows, start: dict[int, int | None], levels: int, cost: CascadeCosts) -> float:
    members = dict.fromkeys(start, 0)
    for held in made.nodes:
        links, at = 0, None
        for node in path_of(held):
            if start.get(node.id) is not None and at in (None, node.depth):
                members[node.id] += 1
                links, at = links + 1, start[node.id]
        if at or links > levels:  # no group ends where this one begins, or too many levels
            return 0.0
    found = 0.0
    for i, begin in start.items():
        if begin is not None and members[i]:
            own = made.tree.node(i)
            end = max((node.depth for node in path_of(own)[1:] if start.get(node.id) is not None), default=0)
            found += group_saving(members[i], count(made, own), end, begin, own.depth, cost)
    return found


def count(made: Rows, node: Node) -> int:
    return sum(node in path_of(held) for held in made.nodes)


def path_of(node: Node) -> list[Node]:
    path = [node]
    while path[-1].parent is not None:
        path.append(path[-1].parent)
    return path


@settings(max_examples=60)
@given(rows(most=6, deepest=5), st.integers(1, 3), costs([0, 0.25, 1, 2.5], [0]))
def test_best_cascade_saves_as_much_as_an_exhaustive_search(made: Rows, levels: int, cost: CascadeCosts) -> None:
    found = best_cascade(cascade.find_branch_points(made.tree, np.bincount(made.node_ids)), levels, cost)
    assert found.saved == best_saving(made, levels, cost)


@given(rows(most=30), st.integers(1, 3), costs([0, 0.25, 1, 2.5], [0]))
def test_no_cascade_saves_more_than_the_upper_bound(made: Rows, levels: int, cost: CascadeCosts) -> None:
    branches = cascade.find_branch_points(made.tree, np.bincount(made.node_ids))
    assert best_cascade(branches, levels, cost).saved <= most_saved(branches, cost)


@given(rows(most=30), costs([0.25, 1, 2.5], [0, 5, 20], [0, 3, 20]))
def test_most_pages_saved_saves_what_best_cascade_computed(made: Rows, cost: CascadeCosts) -> None:
    groups = made.groups(*cost)
    meeting = cascade.find_branch_points(made.tree, np.bincount(made.node_ids))
    promised = [best_cascade(meeting, levels, cost).saved for levels in (1, 2, 3)]
    assert bool(groups.levels) == (promised[0] > cost.first)
    if groups.levels:
        assert saving(made, groups, cost) == pytest.approx(promised[len(groups.levels) - 1])
    for more, less in zip(promised[1 : len(groups.levels)], promised, strict=False):
        assert more - less > cost.level
    if len(groups.levels) == 1:
        assert promised[1] - promised[0] <= cost.level


@given(rows(most=30), costs([0, 0.25, 1], [0, 5], [0, 3]))
def test_group_members_are_adjacent_and_share_all_pages_of_the_group(made: Rows, cost: CascadeCosts) -> None:
    assert_sound(made, made.slots, made.paths, made.groups(*cost))


def assert_sound(made: Rows, slots: Int64, paths: Sequence[list[int]], groups: Groups) -> None:
    """Check the groups of rows in `slots` that hold the pages `paths`."""
    assert sorted(groups.order.tolist()) == list(range(len(slots)))
    covered = [0] * len(slots)
    for group in listed(made, groups):
        assert len(group.rows) > 1
        for row in group.rows:
            assert covered[row] == group.start < group.end  # one group per level, no gap between levels
            covered[row] = group.end
        assert len({tuple(paths[row][: group.end]) for row in group.rows}) == 1
    for level in groups.levels:
        for start, number, slot in zip(level.start, level.count, level.slot, strict=True):
            assert slot in slots[groups.order[start : start + number]]
    assert groups.rows == sum(end > 0 for end in covered)
    assert all(covered[row] for row in groups.order[: groups.rows])


def test_samples_of_two_prompts_make_two_groups_by_default() -> None:
    made = Rows([(0, *range(10, 75)), (0, *range(100, 165))] * 10)
    found = listed(made, MostPagesSaved().choose(made.tree, made.slots, made.node_ids))
    assert sorted(group.rows for group in found) == [[*range(0, 20, 2)], [*range(1, 20, 2)]]
    assert {(group.level, group.start, group.end) for group in found} == {(0, 0, 66)}


def test_prefix_group_that_saves_less_than_its_cost_is_not_made() -> None:
    # Both groups of questions save 3 · 10 − 4 pages, the one of the system prompt 7 · 6 − 8.
    made = Rows([(*range(6), *range(10 * i, 10 * i + 4)) for i in (1, 2)] * 4)
    found = [
        sorted((group.end, len(group.rows)) for group in listed(made, made.groups(1, group, 1000)))
        for group in (17.75, 18.25, 33.75, 34)
    ]
    assert found == [[(10, 4), (10, 4)], [(6, 8)], [(6, 8)], []]


@pytest.mark.parametrize(
    ("count", "fan", "system", "question", "shape"),
    [
        (1024, 4, 64, 8, [(1, 64)]),
        (1024, 32, 64, 8, [(32, 72)]),
        (1024, 32, 32, 44, [(32, 76)]),
        (1024, 2, 16, 4, [(1, 16)]),
        (256, 4, 128, 8, [(1, 128)]),
        (1024, 8, 64, 64, [(1, 64), (128, 128)]),
        (1024, 2, 0, 22, []),
        (1024, 2, 0, 25, []),
        (1024, 2, 0, 27, [(512, 27)]),
    ],
)
def test_default_costs_make_no_small_groups_of_short_questions(
    count: int, fan: int, system: int, question: int, shape: list[tuple[int, int]]
) -> None:
    made = Rows([(*range(system), *([1000 + row // fan] * question)) for row in range(count)])
    levels = MostPagesSaved().choose(made.tree, made.slots, made.node_ids).levels
    assert [(len(level.start), int(level.kv_end.max()) // PAGE) for level in levels] == shape


@pytest.mark.parametrize(
    ("prompts", "common", "samples", "levels"), [(256, 256, 32, 1), (512, 256, 8, 2), (64, 1024, 32, 2)]
)
def test_a_level_is_added_only_if_its_reads_would_not_hide_behind_matmuls(
    prompts: int, common: int, samples: int, levels: int
) -> None:
    questions = [(*range(common), *([10_000 + i] * 32)) for i in range(prompts)]
    made = Rows([questions[row % prompts] for row in range(prompts * samples)])
    assert len(MostPagesSaved().choose(made.tree, made.slots, made.node_ids).levels) == levels


def test_system_prompt_examples_and_questions_make_two_cascade_levels() -> None:
    system, examples = tuple(range(40)), [tuple(range(100 + 30 * i, 130 + 30 * i)) for i in range(3)]
    questions = [system + examples[i % 3] + tuple(range(1000 + 20 * i, 1020 + 20 * i)) for i in range(12)]
    made = Rows([questions[row % 12] for row in range(48)])
    found = listed(made, made.groups(1, 0, 20))
    assert [(group.level, group.start, group.end, len(group.rows)) for group in found] == (
        [(0, 0, 70, 16)] * 3 + [(1, 70, 90, 4)] * 12
    )
    assert [len(made.groups(1, 0, pages).levels) for pages in (40, 600)] == [2, 1]


def test_groups_stand_side_by_side_where_nesting_costs_more() -> None:
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


def test_rows_without_cached_pages_are_not_grouped() -> None:
    groups = MostPagesSaved(CascadeCosts(0, 0, 0)).choose(PrefixTree(PAGE), np.arange(4), np.zeros(4, np.int32))
    assert groups.levels == []
    assert groups.rows == 0


def chain_of_holders(count: int) -> tuple[PrefixTree, Int64]:
    """Return a tree in which each holder locks one page more than the next, and the holders by node id."""
    tree, chain = PrefixTree(1), np.arange(count, dtype=np.int32)
    tree.extend(tree.root, chain, chain)
    nodes = [tree.match(chain[:end]).node for end in range(count, 0, -1)]
    for node in nodes:
        tree.lock(node)
    return tree, np.bincount([node.id for node in nodes])


def test_deep_chain_of_branch_points_is_grouped_from_few_of_its_nodes() -> None:
    tree, counts = chain_of_holders(3000)
    meeting = cascade.find_branch_points(tree, counts)
    assert len(meeting.up) <= cascade.MAX_EXACT_HEIGHT + 1
    pages = 3000 * 3001 / 2
    one, three = (best_cascade(meeting, levels, CascadeCosts(1, 0, 0)).saved for levels in (1, 3))
    assert one > 0.45 * pages  # a square below a diagonal covers half of the area
    assert three > 0.7 * pages


@pytest.mark.parametrize("seed", range(6))
def test_deep_random_trees_are_grouped_within_five_percent_of_the_best(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(seed)
    prompts: list[tuple[int, ...]] = [(0,)]
    while len(prompts) < 120:  # each extends a recent prompt, as turns of conversations do
        longer = prompts[int(rng.integers(max(0, len(prompts) - 6), len(prompts)))]
        prompts.append((*longer, *rng.integers(0, 99, rng.integers(1, 4)).tolist()))
    made = Rows(prompts)
    counts = np.bincount(made.node_ids)
    found = cascade.find_branch_points(made.tree, counts)
    monkeypatch.setattr(cascade, "MAX_EXACT_HEIGHT", 1000)
    every = cascade.find_branch_points(made.tree, counts)
    assert len(found.height_start) - 2 <= 16 < len(every.height_start) - 2
    for cost in (CascadeCosts(1, 0, 0), COSTS):
        assert best_cascade(found, 1, cost).saved >= 0.95 * best_cascade(every, 1, cost).saved


def test_nested_levels_are_searched_only_with_few_grouping_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Rows([(*range(40), *range(100 * row, 100 * row + 20)) for row in (1, 2, 3, 4)] * 3)
    assert len(made.groups(0.1).levels) == 2
    meeting = cascade.find_branch_points(made.tree, np.bincount(made.node_ids))
    assert choices(meeting, 2) == 2 * (1 * 1 + 4 * 2)  # one node with no chain above; four with none or that node
    monkeypatch.setattr(grouping, "MAX_GROUPING_CHOICES", 17)
    assert len(made.groups(0.1).levels) == 1


def test_prefix_groups_are_recomputed_only_when_rows_change() -> None:
    made = Rows([(0, 1, 2, 3), (0, 5, 6, 7)] * 4)
    found, epochs = Grouping(made.tree, MostPagesSaved(CascadeCosts(1, 0, 0))), np.zeros(8, np.int64)
    first = found.groups_of(made.slots, made.node_ids, epochs)
    # A row that is not decoding branches off inside a prompt, which splits the node.
    made.tree.lock(made.tree.match(tokens((0, 1, 2))).node)
    assert found.groups_of(made.slots.copy(), made.node_ids.copy(), epochs.copy()) is first
    other = made.node_ids[[1, *range(1, 8)]]
    counts = [level.count.tolist() for level in found.groups_of(made.slots, other, epochs).levels]
    assert counts in ([[3, 5]], [[5, 3]])
    assert found.groups_of(made.slots, made.node_ids, epochs) is not first
    assert found.groups_of(made.slots, made.node_ids, epochs + 1) is not first
    assert found.groups_of(made.slots[1:], made.node_ids[1:], epochs[1:]).rows == 7


@settings(max_examples=60)
@given(rows(most=30), costs([0, 0.25, 1], [0, 5]), st.data())
def test_groups_without_rows_that_sit_out_are_sound(made: Rows, cost: CascadeCosts, data: st.DataObject) -> None:
    count = len(made.slots)
    found = Grouping(made.tree, MostPagesSaved(cost))
    epochs = np.zeros(count, np.int64)
    full = found.groups_of(made.slots, made.node_ids, epochs)
    for _ in range(2):  # both rounds thin the groups of the full search
        row = np.array(data.draw(st.lists(st.integers(0, count - 1), min_size=1, unique=True)))
        others = np.setdiff1d(np.arange(count), row)
        sitting_out = np.array((made.slots[others], made.node_ids[others], epochs[others]), np.int64)
        left = found.groups_of(made.slots[row], made.node_ids[row], epochs[row], sitting_out)
        assert_sound(made, made.slots[row], [made.paths[i] for i in row], left)
        members = [{*group.rows} & {*row.tolist()} for group in listed(made, full)]
        assert sorted(sorted(m) for m in members if len(m) > 1) == sorted(
            sorted(row[group.rows].tolist()) for group in listed(made, left)
        )
    assert_sound(made, made.slots, made.paths, found.groups_of(made.slots, made.node_ids, epochs))


@given(made=rows(most=30), cost=costs([0, 0.25, 1], [0, 5]), data=st.data())
def test_draft_rows_follow_their_sequence_in_every_group(made: Rows, cost: CascadeCosts, data: st.DataObject) -> None:
    count = len(made.slots)
    groups = MostPagesSaved(cost).choose(made.tree, made.slots, made.node_ids)
    drafted = np.array(data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)))
    sources = np.repeat(np.arange(count), drafted)[data.draw(st.permutations(range(drafted.sum())))].astype(np.int64)
    lent = 1000 + np.arange(len(sources))
    found = with_drafts(groups, made.slots, made.slots[sources])
    if not groups.levels:
        assert found is groups
        return
    both, every = np.concatenate((made.slots, lent)), np.concatenate((np.arange(count), sources))
    assert_sound(made, both, [made.paths[row] for row in every], found)
    assert every[found.order].tolist() == np.repeat(groups.order, 1 + drafted[groups.order]).tolist()
    for level, before in zip(found.levels, groups.levels, strict=True):
        assert level.slot.tolist() == before.slot.tolist()
        ends = before.start + before.count
        members = [groups.order[start:end] for start, end in zip(before.start, ends, strict=True)]
        assert level.count.tolist() == [len(one) + drafted[one].sum() for one in members]

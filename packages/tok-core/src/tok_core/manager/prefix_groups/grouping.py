"""Group decode rows by shared prefix for cascade attention, in one level or in several nested ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tok_core.manager.kv_cache import PrefixTree
from tok_core.manager.prefix_groups.cascade import (
    COSTS,
    BranchPoints,
    CascadeCosts,
    best_cascade,
    choices,
    find_branch_points,
    most_saved,
)
from tok_core.messages import MAX_CASCADE_LEVELS, GroupLevel, Int32, Int64

MAX_GROUPING_CHOICES = 1 << 17
"""Numbers compared, at most, to find the best groups of several levels, so that it takes a few milliseconds at most."""


class GroupingRule(Protocol):
    """Rule that decides which decode rows read a common prefix together."""

    def choose(self, tree: PrefixTree, slots: Int64, node_ids: Int32 | Int64) -> Groups:
        """Return the groups of n decode rows.

        slots     int64 [n], the slot of each row; a group's pages are read through the page table of its first row
        node_ids  int [n], the deepest tree node of each row's pages
        """
        ...


class Groups(NamedTuple):
    """Groups among n decode rows.

    order   int64 [n], a permutation after which the members of every group, of each level, are adjacent, and the rows
            without a group come last
    levels  from the outermost on; a group's `start` is an index into `order`
    rows    number of rows in groups
    """

    order: Int64
    levels: list[GroupLevel]
    rows: int


NO_GROUPS = Groups(np.empty(0, np.int64), [], 0)
NO_SEQUENCES: Int64 = np.empty((3, 0), np.int64)


class Grouping:
    """Groups of the sequences that hold nodes of one tree; chosen again only when rows were added, removed or moved.

    Rows that sit out a step leave their groups for that step. The remaining rows still share the same pages, since a
    decoding sequence changes no page but its last one.
    """

    def __init__(self, tree: PrefixTree, rule: GroupingRule) -> None:
        self._tree = tree
        self._rule = rule
        self._known = NO_SEQUENCES  # slots, nodes and epochs for which `_groups` were chosen
        self._groups = NO_GROUPS

    def groups_of(self, slots: Int64, node_ids: Int32, epochs: Int64, sitting_out: Int64 = NO_SEQUENCES) -> Groups:
        """Return the groups of decode rows. They are chosen again only if rows were added, removed or moved.

        slots        int64 [n], slots of the rows
        node_ids     int32 [n], the deepest tree node of each row's pages, on which the row has a lock
        epochs       int64 [n], the epoch of each slot, which identifies its owner
        sitting_out  int64 [3, m], slots, nodes and epochs of sequences that sit out only this step. Groups are chosen
                     with them and then used without them, so none are chosen when they sit out or return

        Changes of the tree between two calls do not matter. A lock keeps the path above it. If a node on that path is
        split, no sequence holds its upper part before one of these rows does, and then the rows have changed.
        """
        now = np.array((slots, node_ids, epochs), np.int64)
        if sitting_out.size:
            now = np.concatenate((now, sitting_out), axis=1)
            now = now[:, np.argsort(now[0])]
        if not np.array_equal(self._known, now):
            self._groups = self._rule.choose(self._tree, now[0], now[1])
            self._known = now
        return self._without_departed(slots, epochs) if sitting_out.size else self._groups

    def _without_departed(self, slots: Int64, epochs: Int64) -> Groups:
        """Return the groups chosen last, without rows that have left; rows without a group come last."""
        known, _, owner = self._known[:, self._groups.order]
        place = np.full(int(max(known.max(initial=0), slots.max(initial=0))) + 1, -1)
        place[slots] = np.arange(len(slots))
        row = place[known]
        stays = _drop_singletons((row >= 0) & (epochs[row] == owner), self._groups.levels[:1])
        others = np.ones(len(slots), np.bool_)
        others[row[stays]] = False
        order = np.concatenate((row[stays], others.nonzero()[0]))
        until = np.append(0, np.cumsum(stays))  # number of staying rows before each row
        levels = [_shrink_level(level, until, slots[order]) for level in self._groups.levels]
        levels = [level for level in levels if len(level.start)]  # groups are nested: only the last levels get empty
        return Groups(order, levels, int(levels[0].count.sum()) if levels else 0)


def with_drafts(groups: Groups, decode: Int64, sources: Int64) -> Groups:
    """Return the groups among the rows `decode` and m rows of drafts, which follow their sequence's row.

    decode   [n], slots of the rows that `groups` are of
    sources  [m], for each row of a draft the one of `decode` whose sequence it belongs to
    """
    if not groups.levels:
        return groups
    rank = np.empty(int(decode.max()) + 1, np.int64)  # of each slot in `groups.order`
    rank[decode[groups.order]] = np.arange(len(decode))
    rank_of_row = rank[np.concatenate((decode, sources))]
    order = np.argsort(rank_of_row, kind="stable")
    place = np.append(0, np.cumsum(np.bincount(rank_of_row)))  # of the rows of each rank, and the end
    levels = []
    for level in groups.levels:
        start, end = place[level.start], place[level.start + level.count]
        columns = start, end - start, level.slot, level.kv_start, level.kv_end
        levels.append(GroupLevel(*(column.astype(np.int32) for column in columns)))
    return Groups(order, levels, int(levels[0].count.sum()))


class MostPagesSaved:
    """Groups that save the most page reads, minus the costs of groups and members (`CascadeCosts`).

    The first level must save `costs.first`, and each further one `costs.level` more than the best choice without it. No
    other groups of as many levels save more, unless very many nodes of one path are held (`find_branch_points`). Rows
    are handled by a fixed number of array operations.
    """

    def __init__(self, costs: CascadeCosts = COSTS) -> None:
        self._costs = costs

    def choose(self, tree: PrefixTree, slots: Int64, node_ids: Int32 | Int64) -> Groups:
        """See `GroupingRule`."""
        nothing = Groups(np.arange(len(node_ids)), [], 0)
        if tree.depth[node_ids].sum() <= self._costs.first:  # no choice can save more than all pages
            return nothing
        branches = find_branch_points(tree, np.bincount(node_ids))
        chain = _best_chains(branches, self._costs)
        if not chain.any():
            return nothing
        return _arranged(branches, chain, branches.of[node_ids], slots, tree.page_size)


def _arranged(branches: BranchPoints, chain: Int64, branch_of: Int64, slots: Int64, page_size: int) -> Groups:
    """Return the groups that the branches' chains make of rows at the branches `branch_of`."""
    # Depth first: by the first level's group, within it by the second's; branches in no group of a level come last.
    order = np.lexsort(np.where(chain, chain, len(chain)).T[::-1])
    rank = np.empty(len(order), np.uint16 if len(order) < 1 << 16 else np.int64)  # NumPy radix-sorts 16 bits
    rank[order] = np.arange(len(order))
    rank_of_row = rank[branch_of]
    count = np.bincount(rank_of_row, minlength=len(order))
    rows = np.argsort(rank_of_row, kind="stable")
    chain = chain[order]
    ends = branches.depth[chain] * page_size
    starts = np.zeros_like(ends)
    starts[:, 1:] = ends[:, :-1]
    levels = [_level(chain[:, i], count, starts[:, i], ends[:, i], slots, rows) for i in range(chain.shape[1])]
    return Groups(rows, levels, int(levels[0].count.sum()))


def _drop_singletons(stays: NDArray[np.bool_], outermost: Sequence[GroupLevel]) -> NDArray[np.bool_]:
    """Drop singleton groups: clear `stays` for rows that are the only ones left of their group."""
    for level in outermost:
        until = np.append(0, np.cumsum(stays))
        first = until[level.start]
        alone = until[level.start + level.count] - first == 1
        stays[np.searchsorted(until, first[alone] + 1) - 1] = False
    return stays


def _shrink_level(level: GroupLevel, until: Int64, slots: Int64) -> GroupLevel:
    """Return a level's groups after rows have left; groups of one row are dropped.

    `until[i]`: number of rows left before row i. `slots`: slots of the rows left, in order; each group's pages are read
    through the page table of its first slot.
    """
    start = until[level.start]
    count = until[level.start + level.count] - start
    left = count > 1
    start, count = start[left], count[left]
    columns = (start, count, slots[start], level.kv_start[left], level.kv_end[left])
    return GroupLevel(*(column.astype(np.int32) for column in columns))


def _best_chains(branches: BranchPoints, costs: CascadeCosts) -> Int64:
    """Return the chain of each branch, in as many levels as pay off; 0 everywhere if none does."""
    best = best_cascade(branches, 1, costs)
    if best.saved <= costs.first:
        return np.zeros_like(best.chain)
    for levels in range(2, 1 + min(MAX_CASCADE_LEVELS, len(branches.height_start) - 2)):
        if most_saved(branches, costs) - best.saved <= costs.level or choices(branches, levels) > MAX_GROUPING_CHOICES:
            break
        more = best_cascade(branches, levels, costs)
        if more.saved - best.saved <= costs.level:
            break
        best = more
    return best.chain


def _level(group: Int64, count: Int64, start: Int64, end: Int64, slots: Int64, rows: Int64) -> GroupLevel:
    """Return one level's groups as ranges of `rows`.

    Per branch, in order: its group, or 0 for none; its number of rows; the positions where its group's reads start and
    end. `rows` are sorted in the order of their branches.
    """
    through = np.cumsum(count)
    last = (group != np.append(group[1:], 0)).nonzero()[0]  # ends of runs of equal groups, but for a final run of 0
    first = np.append(0, last[:-1] + 1)
    taken = group[last] > 0
    first, last = first[taken], last[taken]
    row = through[first] - count[first]
    columns = (row, through[last] - row, slots[rows[row]], start[first], end[first])
    return GroupLevel(*(column.astype(np.int32) for column in columns))

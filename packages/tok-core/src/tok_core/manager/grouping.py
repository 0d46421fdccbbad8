"""Grouping: which decoding sequences read a common prefix together, in one level or in several nested ones."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tok_core.manager.branches import Branches, meet
from tok_core.manager.cascade import best_cascade, choices
from tok_core.manager.prefix_tree import PrefixTree
from tok_core.messages import MOST_LEVELS, GroupLevel, Int32, Int64

MERGE_PAGES = 1
"""What a group costs a member, in pages of prefix read: its partial result is written, and both are read again."""

LEVEL_PAGES = 4096
"""What each level after the first must save a step, in pages: more kernels in every layer, and no recorded graph."""

MOST_CHOICES = 1 << 17
"""That are compared to find the best groups of several levels, so that it takes a few milliseconds at most."""


class Groups(NamedTuple):
    """Groups among n decode rows.

    order   int64 [n], a permutation after which the members of every group, of each level, stand side by side, the
            rows without a group last
    levels  from the outermost on; a group's `start` is a place in `order`
    rows    how many rows are in groups
    """

    order: Int64
    levels: list[GroupLevel]
    rows: int


class Grouping:
    """Groups of the sequences that hold nodes of one tree; found anew only when rows have come, gone or moved."""

    def __init__(self, tree: PrefixTree, merge_pages: float = MERGE_PAGES, level_pages: float = LEVEL_PAGES) -> None:
        self._tree = tree
        self._merge_pages = merge_pages
        self._level_pages = level_pages
        self._known: Int64 = np.empty((3, 0), np.int64)
        self._groups = Groups(np.empty(0, np.int64), [], 0)

    def find(self, slots: Int64, node_ids: Int32, epochs: Int64) -> Groups:
        """The groups of decode rows; the very same object as before if nothing has changed.

        slots     int64 [n], of the rows
        node_ids  int32 [n], the deepest tree nodes of their pages: prefixes that they hold a lock on
        epochs    int64 [n], which of a slot's owners, one after the other, the row belongs to

        What may have happened to the tree meanwhile changes nothing: a lock keeps the path above it as it is, and
        where a node on it is split, nobody holds the upper part before some row here does.
        """
        now = np.array((slots, node_ids, epochs), np.int64)
        if not np.array_equal(self._known, now):
            self._groups = find_groups(self._tree, node_ids, slots, self._merge_pages, self._level_pages)
            self._known = now
        return self._groups


def find_groups(
    tree: PrefixTree,
    node_ids: Int32,
    slots: Int64,
    merge_pages: float = MERGE_PAGES,
    level_pages: float = LEVEL_PAGES,
) -> Groups:
    """The groups that save most pages of reading, where a row's part in each costs `merge_pages`.

    Each level after the first must save `level_pages` more than the best without it. No other groups of as many levels
    save more, but where very many nodes of one path are held (`branches.meet`). Rows are handled by a fixed number of
    array operations.
    """
    branches = meet(tree, np.bincount(node_ids))
    chain = _best_chains(branches, merge_pages, level_pages)
    if not chain.any():
        return Groups(np.arange(len(node_ids)), [], 0)
    return _arranged(branches, chain, branches.of[node_ids], slots, tree.page_size)


def _arranged(branches: Branches, chain: Int64, branch_of: Int64, slots: Int64, page_size: int) -> Groups:
    """The groups that the branches' chains make of rows at the branches `branch_of`."""
    # Depth first: by the first level's group, within it by the second's; who is in none of a level comes last.
    order = np.lexsort(np.where(chain, chain, len(chain)).T[::-1])
    rank = np.empty(len(order), np.uint16 if len(order) < 1 << 16 else np.int64)  # 16 bits are sorted by radix
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


def _best_chains(branches: Branches, merge_pages: float, level_pages: float) -> Int64:
    """The chain of each branch, in as many levels as pay."""
    all_shared = float(((branches.rows - 1) * (branches.depth - branches.depth[branches.up])).sum())
    best = best_cascade(branches, 1, merge_pages)
    for levels in range(2, 1 + min(MOST_LEVELS, len(branches.level) - 2)):
        if all_shared - best.saved <= level_pages or choices(branches, levels) > MOST_CHOICES:
            break
        more = best_cascade(branches, levels, merge_pages)
        if more.saved - best.saved <= level_pages:
            break
        best = more
    return best.chain


def _level(group: Int64, count: Int64, start: Int64, end: Int64, slots: Int64, rows: Int64) -> GroupLevel:
    """Of branches in order: the group of each, 0 for none, its number of rows, its positions; of `rows` in order."""
    through = np.cumsum(count)
    last = (group != np.append(group[1:], 0)).nonzero()[0]  # of a run of branches; one of none may come last
    first = np.append(0, last[:-1] + 1)
    taken = group[last] > 0
    first, last = first[taken], last[taken]
    row = through[first] - count[first]
    columns = (row, through[last] - row, slots[rows[row]], start[first], end[first])
    return GroupLevel(*(column.astype(np.int32) for column in columns))

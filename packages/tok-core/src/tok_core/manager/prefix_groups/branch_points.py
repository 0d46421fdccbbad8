"""Find the branch points of the prefix tree where running sequences meet, with a few array operations per height.

Legend: V branches, H their greatest height.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tok_core.manager.kv_cache import PrefixTree
from tok_core.messages import Int64

MAX_EXACT_HEIGHT = 16
"""Largest number of branch points on one path that is handled exactly; see `find_branch_points`."""


class BranchPoints(NamedTuple):
    """Nodes with at least two rows at or below them, and with more than any child has; the root comes first.

    up      int64 [V], the nearest branch above; the root's is itself
    depth   int64 [V], pages from the root
    rows    int64 [V], number of rows at or below
    level   int64 [H + 2], branches of height h are level[h] to level[h + 1] − 1; siblings are adjacent
    of      int64 by tree node id, for nodes that rows hold: the nearest branch at or above
    """

    up: Int64
    depth: Int64
    rows: Int64
    level: Int64
    of: Int64


def find_branch_points(tree: PrefixTree, counts: Int64) -> BranchPoints:
    """Return the branch points; `counts[i]`, int64, is the number of rows that hold tree node i.

    If a path has more than MAX_EXACT_HEIGHT branch points, row counts are rounded to a few steps per doubling, and only
    nodes at which the rounded count changes are kept.
    """
    held = counts.nonzero()[0]
    place = _shared(tree, held)
    if not place.any():  # rows meet only at the root, which has no pages
        root, of = np.zeros(1, np.int64), np.zeros(len(counts), np.int64)
        return BranchPoints(root, root, np.array([counts.sum()]), np.array([0, 1]), of)
    at = np.bincount(place, counts[held], len(tree.parent)).astype(np.int64)
    ids = _closed(tree, at.nonzero()[0])
    index = np.empty(len(at), np.int64)
    index[ids] = np.arange(len(ids))
    up, rows = index[tree.parent[ids]], at[ids]
    _sum_upwards(rows, up)
    keep = _branching(up, rows)
    near = _nearest(up, keep)
    heights = _heights(near[up])
    kept = keep.nonzero()[0]
    kept = kept[np.lexsort((near[up[kept]], heights[kept]))]
    number = np.empty(len(ids), np.int64)
    number[kept] = np.arange(len(kept))
    of, index[ids] = np.zeros(len(counts), np.int64), number[near]
    of[held] = index[place]
    level = np.append(0, np.cumsum(np.bincount(heights[kept])))
    return BranchPoints(number[near[up[kept]]], tree.depth[ids[kept]], rows[kept], level, of)


def _shared(tree: PrefixTree, node_ids: Int64) -> Int64:
    """Return for each node the nearest one, at or above it, with more than one lock; no rows meet below."""
    place = node_ids
    while not tree.single_lock[0] and (alone := tree.single_lock[place]).any():
        place = np.where(alone, tree.parent[place], place)
    return place


def _closed(tree: PrefixTree, node_ids: Int64) -> Int64:
    """Return the nodes and all their ancestors, in ascending order; the root, whose id is 0, is first."""
    found = np.zeros(len(tree.parent), np.bool_)
    found[0] = True
    new = node_ids[~found[node_ids]]
    while len(new):
        found[new] = True
        new = tree.parent[new]
        new = new[~found[new]]
    return np.flatnonzero(found)


def _sum_upwards(rows: Int64, up: Int64) -> None:
    """Add to each node the rows of all nodes below it."""
    heights = _heights(up)
    order = np.argsort(-heights, kind="stable")
    ends = np.cumsum(np.bincount(heights)[::-1])
    for start, end in zip([0, *ends[:-2].tolist()], ends[:-1].tolist(), strict=False):
        level = order[start:end]
        np.add.at(rows, up[level], rows[level])


def _branching(up: Int64, rows: Int64) -> NDArray[np.bool_]:
    """Return a mask of the nodes to keep: the root, and those with two rows or more of which no child has as many.

    If a path has too many of these, nodes of which a child has nearly as many rows are dropped, too.
    """
    most = np.zeros(len(up), np.int64)  # largest number of rows of any child
    np.maximum.at(most, up[1:], rows[1:])
    keep = (rows > most) & (rows > 1)
    keep[0] = True
    for steps in (8, 4, 2, 1):
        if _heights(_nearest(up, keep)[up])[keep].max() <= MAX_EXACT_HEIGHT:
            break
        keep &= np.floor(steps * np.log2(rows)) > np.floor(steps * np.log2(np.maximum(most, 0.5)))
        keep[0] = True
    return keep


def _nearest(up: Int64, keep: NDArray[np.bool_]) -> Int64:
    """Return the nearest node to keep at or above each node."""
    near: Int64 = np.where(keep, np.arange(len(up)), up)
    while not keep[near].all():
        near = near[near]
    return near


def _heights(up: Int64) -> Int64:
    """Return the steps from each node to the root, which is node 0, by doubling how far `up` reaches."""
    heights: Int64 = (up != np.arange(len(up))).astype(np.int64)
    while up.any():
        heights += heights[up]
        up = up[up]
    return heights

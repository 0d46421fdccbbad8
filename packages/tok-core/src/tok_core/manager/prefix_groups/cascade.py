"""Choose the prefix groups of a cascade that save the most page reads.

First find the branch points of the prefix tree where running sequences meet, with a few array operations per height
(`find_branch_points`). Then choose groups by dynamic programming over the branch points (`best_cascade`).

A chain is the list of branches in whose groups a row is, from the root down. The first group reads from position 0,
each further group from where the one before ends. If a branch below a chain is chosen, its group reads from 0 or from
the end of one of the chain's groups. Its rows leave the groups of the chain beyond that point.

    chain (A, B), and a branch C below B: not chosen (A, B); chosen (A, B, C), (A, C) or (C)

The search starts at the branches furthest from the root. It finds the best saving of each branch for every chain that
may stand above the branch.

Legend: V branches; H their greatest height; k the height of a branch, which is its number of steps to the root; C
chains of at most L of the k − 1 branches between it and the root.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import combinations, pairwise
from math import comb
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tok_core.manager.kv_cache import PrefixTree
from tok_core.messages import Float64, Int64

MAX_EXACT_HEIGHT = 16
"""Largest number of branch points on one path that is handled exactly; see `find_branch_points`."""


class BranchPoints(NamedTuple):
    """Nodes with at least two rows at or below them, and with more than any child has; the root comes first.

    up            int64 [V], the nearest branch above; the root's is itself
    depth         int64 [V], pages from the root
    rows          int64 [V], number of rows at or below
    height_start  int64 [H + 2], branches of height h are height_start[h] to height_start[h + 1] − 1; siblings are
                  adjacent
    of            int64 by tree node id, for nodes that rows hold: the nearest branch at or above
    """

    up: Int64
    depth: Int64
    rows: Int64
    height_start: Int64
    of: Int64


def find_branch_points(tree: PrefixTree, counts: Int64) -> BranchPoints:
    """Return the branch points; `counts[i]`, int64, is the number of rows that hold tree node i.

    If a path has more than MAX_EXACT_HEIGHT branch points, not all are kept: row counts are rounded to a few steps
    per doubling, and nodes at which the rounded count does not change are dropped.
    """
    held = (counts > 0).nonzero()[0]  # NumPy searches booleans in half the time
    place = _shared(tree, held)
    if not place.any():  # rows meet only at the root, which has no pages
        root, of = np.zeros(1, np.int64), np.zeros(len(counts), np.int64)
        return BranchPoints(root, root, np.array([counts.sum()]), np.array([0, 1]), of)
    ids = _closed(tree, place)
    index = np.empty(len(tree.parent), np.int64)
    index[ids] = np.arange(len(ids))
    up, rows = index[tree.parent[ids]], np.bincount(index[place], counts[held], len(ids)).astype(np.int64)
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
    height_start = np.append(0, np.cumsum(np.bincount(heights[kept])))
    return BranchPoints(number[near[up[kept]]], tree.depth[ids[kept]], rows[kept], height_start, of)


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
        nodes = order[start:end]  # of one height
        np.add.at(rows, up[nodes], rows[nodes])


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


class CascadeCosts(NamedTuple):
    """Costs of groups, in pages that one row reads by itself.

    member  per row of a group: its partial result is written, and both partial results are read again
    group   per group: work blocks of its own, however few pages they read
    level   per level after the first, in a step: more kernels in every layer, and no CUDA graph
    compute_bound_rows  rows of a group whose matmuls take as long as reading its pages once. A group of r rows hides
                        the share r / compute_bound_rows of each read behind its matmuls
    first   for the first level, in a step: more kernels in every layer
    """

    member: float
    group: float
    level: float
    compute_bound_rows: float = math.inf
    first: float = 0.0


COSTS = CascadeCosts(member=2, group=20, level=4096, compute_bound_rows=40, first=1024)
"""Measured on an H200: decode attention of one layer, pages of 16 tokens, 256 to 8192 rows with 16 or more common
pages, in no group, in one level and in two. A least-squares fit of the relative error gives 1.7 pages per member, 19
per group and 2800 per level with the Triton kernels, and 3.6, 21 and 2900 with FlashInfer's. A page takes 0.0068 µs.
The CUDA graph that further levels lose comes on top of these.

All are in pages of 32 KiB, those of the model measured; models with larger pages pay less.

first: in steps of 5 rows of an 8B model, the kernels and the merge of one group took 15 µs a layer: 2,200 such pages,
or 1,100 of that model's, which have 64 KiB. The value is below both, so that no group is lost that pays.

compute_bound_rows: 700 TFLOP/s over 4.5 TB/s are 156 operations per byte. With 4 query heads per key head, bfloat16
keys and values take 4 operations per byte and row. docs/ablations.md has the figures with and without this term.
"""

CPU_COSTS = COSTS._replace(first=0)
"""Costs on a CPU, which launches no kernels; nothing else was measured there."""


class CascadePlan(NamedTuple):
    """Best choice of groups in at most L levels.

    saved  pages saved compared with no groups, minus the costs of members and groups
    chain  int64 [V, L], each branch's chain, padded with 0, the root
    """

    saved: float
    chain: Int64


def best_cascade(branches: BranchPoints, levels: int, costs: CascadeCosts) -> CascadePlan:
    """Return the groups of at most `levels` levels that save the most; the cost of further levels is left out."""
    height = len(branches.height_start) - 2
    paths = _paths(branches)
    below = np.zeros((1, 1))
    decided: list[Int64] = []
    for k in range(height, 0, -1):
        first, last = branches.height_start[k : k + 2].tolist()
        if k == height:
            below = np.zeros((last - first, len(_chains(k + 1, levels))))
        saved, chosen = _decide(branches, paths[k], first, below, _options(k, levels), costs)
        decided.append(chosen)
        below = np.zeros((first - int(branches.height_start[k - 1]), saved.shape[1]))
        above = branches.up[first:last] - branches.height_start[k - 1]
        eldest = np.append(True, above[1:] != above[:-1]).nonzero()[0]
        below[above[eldest]] = np.add.reduceat(saved, eldest)
    return CascadePlan(float(below[0, 0]), _follow(branches, paths, decided[::-1], levels))


def most_saved(branches: BranchPoints, costs: CascadeCosts) -> float:
    """Return an upper bound of what any choice saves.

    It assumes that groups read all pages down to some branches, each page once. A row costs as one member, or saves
    nothing. A branch whose pages are read has a group, or one of its children does.
    """
    up, one = branches.up, read_cost(1, costs)
    by_row = np.maximum(branches.depth * one - costs.member, 0)
    reads = read_cost(branches.rows, costs) * (branches.depth - branches.depth[up])
    gain = branches.rows * (by_row - by_row[up]) - reads
    best, below = np.full(len(up), -costs.group, np.float64), np.zeros(len(up))
    for k in range(len(branches.height_start) - 2, 0, -1):
        own = slice(*branches.height_start[k : k + 2].tolist())
        saved = gain[own] + np.where(below[own] > 0, below[own], best[own])
        np.maximum.at(best, up[own], saved)
        np.add.at(below, up[own], np.maximum(saved, 0))
    return float(below[0])


def read_cost(rows: Int64 | int, costs: CascadeCosts) -> Float64:
    """Return the share of a page's read that matmuls do not hide, for groups of so many rows; float64 as `rows`."""
    return np.maximum(0.0, 1 - rows / costs.compute_bound_rows)


def choices(branches: BranchPoints, levels: int) -> int:
    """Return how many numbers `best_cascade` compares, as a measure of its cost."""
    chains = [sum(comb(k - 1, links) for links in range(levels + 1)) for k in range(1, len(branches.height_start) - 1)]
    return levels * int(np.diff(branches.height_start)[1:] @ np.array(chains, np.int64))


class _Options(NamedTuple):
    """Options of a branch of height k, for each chain above it. Column i: it is chosen and keeps i links of the chain.

    same   int64 [C], index of the unchanged chain among the chains of height k + 1
    to     int64 [C, L], index, among the same, of the chain that then ends with the branch
    start  int64 [C, L], height of the branch where its group begins to read, 0 for the root
    end    int64 [C, L], height of the branch down to which the chain's groups read
    more   int64 [C, L], change in the number of groups of a row; may be negative
    bar    float64 [C, L], 0, or −∞ if the chain has fewer than i links
    """

    same: Int64
    to: Int64
    start: Int64
    end: Int64
    more: Int64
    bar: Float64


@lru_cache(maxsize=256)
def _chains(k: int, levels: int) -> list[tuple[int, ...]]:
    """Return the chains that may stand above a branch of height k, as ascending heights; the first is empty."""
    return [chain for links in range(levels + 1) for chain in combinations(range(1, k), links)]


@lru_cache(maxsize=256)
def _options(k: int, levels: int) -> _Options:
    chains = _chains(k, levels)
    place = {chain: i for i, chain in enumerate(_chains(k + 1, levels))}
    to, start, end, more = np.zeros((4, len(chains), levels), np.int64)
    bar = np.full((len(chains), levels), -np.inf)
    for i, chain in enumerate(chains):
        for kept in range(min(len(chain) + 1, levels)):
            to[i, kept] = place[*chain[:kept], k]
            start[i, kept], end[i, kept] = (0, *chain)[kept], (0, *chain)[-1]
            more[i, kept], bar[i, kept] = kept + 1 - len(chain), 0
    return _Options(np.array([place[chain] for chain in chains]), to, start, end, more, bar)


def _paths(branches: BranchPoints) -> list[Int64]:
    """Return for each height k the path from the root to each branch of it, int64 [V of that height, k + 1]."""
    paths = [np.zeros((1, 1), np.int64)]
    for k, (first, last) in enumerate(pairwise(branches.height_start[1:].tolist())):
        above = paths[k][branches.up[first:last] - branches.height_start[k]]
        paths.append(np.column_stack((above, np.arange(first, last))))
    return paths


def _decide(
    branches: BranchPoints, path: Int64, first: int, below: Float64, options: _Options, costs: CascadeCosts
) -> tuple[Float64, Int64]:
    """Return the best saving of each branch of a height in each chain, float64 [V, C], and its option, −1: unchosen."""
    own = slice(first, first + len(path))
    rows, depth = branches.rows[own, None, None], branches.depth[path]
    here, start, end = depth[:, -1, None, None], depth[:, options.start], depth[:, options.end]
    # Rows that leave a group raise what the group does not hide: pages read again are counted as not hidden at all.
    pages = (here - end) * (rows * read_cost(1, costs) - read_cost(rows, costs)) - (end - start)
    own_gain = pages - rows * costs.member * options.more - costs.group
    with_it = own_gain + below[:, options.to] + options.bar
    without = below[:, options.same]
    best = with_it.max(2)
    return np.maximum(best, without), np.where(best > without, with_it.argmax(2), -1)


def _follow(branches: BranchPoints, paths: list[Int64], decided: list[Int64], levels: int) -> Int64:
    """Return the chain of every branch, by the decisions made, from the root on."""
    found = np.zeros((len(branches.up), levels), np.int64)
    above = np.zeros(1, np.int64)  # indices of the chains of the branches one height lower
    for k, chosen in enumerate(decided, 1):
        first, last = branches.height_start[k : k + 2].tolist()
        chain, options = above[branches.up[first:last] - branches.height_start[k - 1]], _options(k, levels)
        choice = chosen[np.arange(last - first), chain]
        above = np.where(choice < 0, options.same[chain], options.to[chain, choice])
        found[first:last] = paths[k][np.arange(last - first)[:, None], _links(k + 1, levels)[above]]
    return found


@lru_cache(maxsize=256)
def _links(k: int, levels: int) -> Int64:
    """Return the heights that each chain above height k links, int64 [C, L], padded with the root's, 0."""
    chains = _chains(k, levels)
    return np.array([chain + (0,) * (levels - len(chain)) for chain in chains], np.int64).reshape(-1, levels)

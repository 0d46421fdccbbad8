"""Grouping: which decoding sequences read a common prefix together, chosen greedily from the deepest node up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from tok_core.manager.prefix_tree import Node, PrefixTree
from tok_core.messages import EMPTY, Int32, Int64

MERGE_PAGES = 1
"""What merging costs a member, in pages of prefix read: its partial result is written, and both are read again."""


class Groups(NamedTuple):
    """G groups among n decode rows.

    order      int64 [n], a permutation: each group's members side by side first, then the rows without a group
    row_start  int32 [G], place in `order` of a group's first member
    row_count  int32 [G]
    slot       int32 [G], one member's slot, in whose page table the prefix is found
    kv_end     int32 [G], the prefix is the positions [0, kv_end)
    """

    order: Int64
    row_start: Int32
    row_count: Int32
    slot: Int32
    kv_end: Int32


def find_groups(
    tree: PrefixTree, node_ids: Int32, slots: Int32, lengths: Int32, min_saving: int = MERGE_PAGES
) -> Groups:
    """Groups the sequences that hold `node_ids`, int32 [n], the deepest tree nodes of their pages.

    lengths     int32 [n], tokens in the cache before the one that is decoded now; prefixes end at or before them
    min_saving  pages that a group must save for each member

    Nodes are asked deepest first. A node groups the m rows at or below it that have no group yet when that saves
    enough, (m − 1) · depth > min_saving · m pages, and else leaves them to its parent. With min_saving 0 the pages
    saved are at least half of the most that any grouping saves: of a best group at a node all but one member are,
    here, in groups as deep or deeper, and a member of a group accounts for half of the group's depth or more.
    Only nodes that are held, and those above them, are visited; rows are handled by array operations alone.
    """
    node_ids = _shared(tree, node_ids)
    counts = np.bincount(node_ids)
    held = counts.nonzero()[0]
    groups = _choose(tree, dict(zip(held.tolist(), counts[held].tolist(), strict=True)), min_saving)
    if not groups:
        return Groups(np.arange(len(node_ids)), EMPTY, EMPTY, EMPTY, EMPTY)
    # 16 bits where they do: those are sorted by radix.
    group_of_node = np.full(len(counts), len(groups), np.uint16 if len(groups) < 1 << 16 else np.int64)
    for group, (_, members) in enumerate(groups):
        group_of_node[members] = group
    group_of_row = group_of_node[node_ids]
    order = np.argsort(group_of_row, kind="stable")
    count = np.bincount(group_of_row, minlength=len(groups) + 1)[:-1].astype(np.int32)
    start = (np.cumsum(count) - count).astype(np.int32)
    kv_end = np.array([depth * tree.page_size for depth, _ in groups], np.int32)
    assert (np.repeat(kv_end, count) <= lengths[order[: count.sum()]]).all(), "a prefix longer than its sequence"
    return Groups(order, start, count, slots[order[start]].astype(np.int32), kv_end)


def _shared(tree: PrefixTree, node_ids: Int32) -> Int32:
    """Each node, or the nearest one above it that somebody else holds too; no group is made below."""
    alone, node_ids = tree.alone[node_ids].nonzero()[0], node_ids.copy()
    while len(alone):
        above = tree.parent[node_ids[alone]]
        alone = alone[above != node_ids[alone]]  # the root has nothing above it
        node_ids[alone] = tree.parent[node_ids[alone]]
        alone = alone[tree.alone[node_ids[alone]]]
    return node_ids


def _choose(tree: PrefixTree, counts: dict[int, int], min_saving: int) -> list[tuple[int, list[int]]]:
    """Each group as its depth in pages and the held nodes whose rows it takes. `counts`: rows by held node."""
    groups = []
    waiting = {node_id: [node_id] for node_id in counts}  # node: held nodes at or below it without a group
    rows = dict(counts)
    for node in _deepest_first(tree, counts):
        members, count = waiting.pop(node.id, []), rows.pop(node.id, 0)  # none: all below have groups
        if (count - 1) * node.depth > min_saving * count:
            groups.append((node.depth, members))
        elif count and node.parent is not None:
            parent = node.parent.id
            waiting[parent] = _joined(waiting.get(parent, []), members)
            rows[parent] = rows.get(parent, 0) + count
    return groups


def _deepest_first(tree: PrefixTree, node_ids: Iterable[int]) -> list[Node]:
    """The nodes and all above them, every node after those below it."""
    found: dict[int, Node] = {}
    for node_id in node_ids:
        node: Node | None = tree.node(node_id)
        while node is not None and node.id not in found:
            found[node.id] = node
            node = node.parent
    return sorted(found.values(), key=lambda node: -node.depth)


def _joined(left: list[int], right: list[int]) -> list[int]:
    """Both lists in the longer one, so that passing many up a deep tree copies little."""
    longer, shorter = (left, right) if len(left) >= len(right) else (right, left)
    longer += shorter
    return longer

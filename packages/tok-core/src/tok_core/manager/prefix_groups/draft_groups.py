"""Group the rows that verify a sequence's drafts, so that its pages are read once for all of them."""

from __future__ import annotations

import numpy as np

from tok_core.config import MAX_GRAPH_GROUPS
from tok_core.manager.prefix_groups.cascade import CascadeCosts, read_cost
from tok_core.manager.prefix_groups.grouping import NO_GROUPS, Groups
from tok_core.messages import GroupLevel, Int32, Int64


def group_drafts(
    decode: Int64, lent: Int64, sources: Int64, length: Int32, page_size: int, costs: CascadeCosts
) -> Groups:
    """Return a group for each sequence with drafts where that saves page reads: its rows read its full pages once.

    If there are more than MAX_GRAPH_GROUPS, those that save most are grouped.

    decode   [n], slots of the rows
    lent     [m], those of them that are lent to drafted tokens
    sources  [m], slots of the sequences that the lent slots stand for; equal ones are adjacent
    length   positions in the cache, by slot
    """
    first = np.append(True, sources[1:] != sources[:-1]).nonzero()[0]
    parents, count = sources[first], 1 + np.diff(np.append(first, len(sources)))
    pages = length[parents].astype(np.int64) // page_size
    saved = count * (pages * read_cost(1, costs) - costs.member) - pages * read_cost(count, costs) - costs.group
    grouped = saved > 0
    if grouped.sum() > MAX_GRAPH_GROUPS:
        grouped[np.argsort(-saved, kind="stable")[MAX_GRAPH_GROUPS:]] = False
    total = float(saved[grouped].sum()) - costs.first
    if total <= 0:
        return NO_GROUPS
    parents, pages, row_count, count = parents[grouped], pages[grouped], count, count[grouped]
    start = np.cumsum(count) - count
    members = np.empty(count.sum(), np.int64)
    of_parent = np.zeros(len(members), np.bool_)
    of_parent[start] = True
    members[of_parent], members[~of_parent] = parents, lent[np.repeat(grouped, row_count - 1)]
    row_of = np.zeros(int(decode.max()) + 1, np.int64)
    row_of[decode] = np.arange(len(decode))
    others = np.ones(len(decode), np.bool_)
    others[row_of[members]] = False
    order = np.concatenate((row_of[members], others.nonzero()[0]))
    columns = start, count, parents, np.zeros_like(pages), pages * page_size
    return Groups(order, [GroupLevel(*(column.astype(np.int32) for column in columns))], len(members), total)

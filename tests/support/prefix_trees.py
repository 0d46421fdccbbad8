"""Check every invariant of a prefix tree."""

from __future__ import annotations

import numpy as np

from tok_core.manager.kv_cache import PrefixTree
from tok_core.manager.kv_cache.tree_nodes import LeafBatch, Node
from tok_core.messages import EMPTY, Int32


def check_tree(tree: PrefixTree) -> None:
    """Assert every invariant; walks the whole tree."""
    nodes, stack = list[Node](), [tree.root]
    while stack:
        nodes.append(stack.pop())
        _check_node(tree, nodes[-1])
        stack += [child for child in nodes[-1].children.values() if isinstance(child, Node)]
    loose = [_checked_leaf(tree, node, *item) for node in nodes for item in node.children.items()]
    pages = np.concatenate([*(node.pages for node in nodes), *loose])
    assert len(pages) == tree.pages == len(np.unique(pages))
    locked = sum(len(node.pages) for node in nodes if node.locks)
    assert tree.evictable == tree.pages - locked
    assert len(nodes) + len(tree._free_ids) == len(tree._nodes)
    queued = [number for _, number in tree._queue]
    assert sorted(queued) == sorted([*tree._leaves, *(node.id for node in nodes if node.queued)])
    assert all(used <= tree.node(number).used for used, number in tree._queue if number > 0)


def _checked_leaf(tree: PrefixTree, parent: Node, key: bytes, child: Node | LeafBatch) -> Int32:
    """Check the leaf of a batch that `parent` finds by `key`, and return its pages; none if the child is a node."""
    if isinstance(child, Node):
        return EMPTY
    leaf = child.row(key)
    assert child.parent is parent
    assert child.used + child.removed <= leaf.used <= parent.used
    first_page = leaf.tokens[: tree.page_size].tobytes()
    assert key.endswith(first_page) if parent.parent is None else key == first_page
    assert len(leaf.tokens) == len(leaf.pages) * tree.page_size > 0
    assert tree._leaves[-child.used] is child
    assert any(number == -child.used and used <= child.used + child.removed for used, number in tree._queue)
    return leaf.pages


def _check_node(tree: PrefixTree, node: Node) -> None:
    assert tree._nodes[node.id] is node
    assert len(node.tokens) == len(node.pages) * tree.page_size
    assert node.locks >= sum(child.locks for child in node.children.values() if isinstance(child, Node))
    assert tree.single_lock[node.id] == (node.locks == 1)
    assert tree.parent[node.id] == (node.parent or node).id
    assert tree.depth[node.id] == node.depth
    if node.parent is None:
        assert node is tree.root
        assert node.depth == len(node.pages) == 0
        return
    assert len(node.pages)
    assert node.depth == node.parent.depth + len(node.pages)
    assert node.used <= node.parent.used
    assert node.parent.children[node.key] is node
    assert node.key == tree._key(node.parent, node.tokens.tobytes(), node.key[: -tree._width])
    assert node.queued or node.locks or node.children

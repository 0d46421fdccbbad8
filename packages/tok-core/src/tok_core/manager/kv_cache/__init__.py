"""Manage KV cache pages: allocation, sharing through the prefix tree, retained prompts, eviction, preemption."""

from __future__ import annotations

from tok_core.manager.kv_cache.paging import Paging
from tok_core.manager.kv_cache.preemption import choose_victim, rank_victims
from tok_core.manager.kv_cache.prefix_tree import PrefixTree
from tok_core.manager.kv_cache.retained_prompts import RetainedPrompt, RetainedPrompts

__all__ = [
    "Paging",
    "PrefixTree",
    "RetainedPrompt",
    "RetainedPrompts",
    "choose_victim",
    "rank_victims",
]

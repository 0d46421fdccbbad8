"""Manage KV cache pages: allocation, sharing through the prefix tree, retained prompts, eviction, preemption."""

from __future__ import annotations

from tok_core.manager.kv_cache.paging import Paging
from tok_core.manager.kv_cache.preemption import LeastWorkLost, PreemptionPolicy
from tok_core.manager.kv_cache.prefix_tree import PrefixTree
from tok_core.manager.kv_cache.retained_prompts import RetainedPrompt, RetainedPrompts

__all__ = [
    "LeastWorkLost",
    "Paging",
    "PreemptionPolicy",
    "PrefixTree",
    "RetainedPrompt",
    "RetainedPrompts",
]

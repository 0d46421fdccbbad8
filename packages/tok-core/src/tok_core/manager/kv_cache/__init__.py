"""Pages of the KV cache: allocation, sharing through the prefix tree, eviction, retained prompts, preemption."""

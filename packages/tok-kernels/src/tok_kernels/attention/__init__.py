"""Compute paged attention: decode rows, prefill chunks, and cascade attention over shared prefixes."""

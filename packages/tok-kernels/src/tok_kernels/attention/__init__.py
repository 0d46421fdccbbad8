"""Paged attention: decode, varlen prefill, and cascade attention over shared prefixes."""

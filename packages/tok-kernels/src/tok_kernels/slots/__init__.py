"""Decode rows are gathered from per-slot columns, and sampled tokens are scattered back."""

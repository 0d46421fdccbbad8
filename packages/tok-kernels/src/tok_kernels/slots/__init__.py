"""Gather decode rows from per-slot columns, and scatter sampled tokens back."""

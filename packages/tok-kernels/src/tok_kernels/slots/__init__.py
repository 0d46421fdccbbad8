"""Gather decode rows from per-slot columns, scatter sampled tokens back, and fill slots for drafts."""

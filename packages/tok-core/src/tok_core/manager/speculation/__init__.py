"""Speculative decoding by n-grams: draft tokens from earlier texts, and verify several in one step."""

from __future__ import annotations

from tok_core.manager.speculation.speculator import Drafts, Speculator

__all__ = ["Drafts", "Speculator"]

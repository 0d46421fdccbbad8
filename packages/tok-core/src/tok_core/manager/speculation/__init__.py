"""Draft tokens from what was generated before, and let one step verify several tokens of a sequence."""

from __future__ import annotations

from tok_core.manager.speculation.speculator import Drafts, Speculator

__all__ = ["Drafts", "Speculator"]

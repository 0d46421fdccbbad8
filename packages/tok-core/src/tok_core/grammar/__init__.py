"""Grammars: what the text of a sample must be, how it is compiled, and which tokens it allows next."""

from __future__ import annotations

from tok_core.grammar.kinds import KINDS, Grammar, Kind

__all__ = ["KINDS", "Grammar", "Kind"]

"""Follow the grammars of guided sequences and provide their token masks."""

from __future__ import annotations

from tok_core.manager.grammar.grammar_manager import GrammarManager
from tok_core.manager.grammar.grammar_state import GrammarState, GrammarWorkers, MatcherState

__all__ = [
    "GrammarManager",
    "GrammarState",
    "GrammarWorkers",
    "MatcherState",
]

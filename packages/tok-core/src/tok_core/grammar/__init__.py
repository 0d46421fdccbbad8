"""Guided decoding: check and compile grammars, and compute which tokens a sequence may sample next."""

from __future__ import annotations

from tok_core.grammar.checker import Checker, GrammarLimits, LocalExaminer, refuse
from tok_core.grammar.json_schema import Json, SchemaRules
from tok_core.grammar.local import LocalWorkers, loader
from tok_core.grammar.masks import Mask, MaskCache
from tok_core.grammar.matchers import (
    MAX_KNOWN_MASKS,
    REPLAY,
    FollowRequest,
    FollowResult,
    MatcherCall,
    MatcherReply,
    Verdict,
)
from tok_core.grammar.regex import Unsupported, complement, one_of, regular
from tok_core.grammar.rules import NOTHING, Rules, literal, sequence
from tok_core.grammar.text import ENDLESS, expression
from tok_core.grammar.worker_processes import COMPILING, IDLE, WorkerLost, WorkerProcesses, process_checker

__all__ = [
    "COMPILING",
    "ENDLESS",
    "IDLE",
    "MAX_KNOWN_MASKS",
    "NOTHING",
    "REPLAY",
    "Checker",
    "FollowRequest",
    "FollowResult",
    "GrammarLimits",
    "Json",
    "LocalExaminer",
    "LocalWorkers",
    "Mask",
    "MaskCache",
    "MatcherCall",
    "MatcherReply",
    "Rules",
    "SchemaRules",
    "Unsupported",
    "Verdict",
    "WorkerLost",
    "WorkerProcesses",
    "complement",
    "expression",
    "literal",
    "loader",
    "one_of",
    "process_checker",
    "refuse",
    "regular",
    "sequence",
]

"""Tokenizer, chat template and incremental detokeniser. Does not import torch."""

from __future__ import annotations

from tok_core.text.detokenise import Detokeniser
from tok_core.text.endings import MAX_SPANNING_BYTES, CompletingTokens, EndingIndex
from tok_core.text.files import with_end_token
from tok_core.text.loading import load_text
from tok_core.text.piece_bytes import WORD, PieceBytes, Words
from tok_core.text.template import ChatTemplate
from tok_core.text.tokenizer import Tokenizer

__all__ = [
    "MAX_SPANNING_BYTES",
    "WORD",
    "ChatTemplate",
    "CompletingTokens",
    "Detokeniser",
    "EndingIndex",
    "PieceBytes",
    "Tokenizer",
    "Words",
    "load_text",
    "with_end_token",
]

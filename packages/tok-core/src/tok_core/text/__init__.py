"""Text in and out of the engine: tokenizer, chat template, incremental detokeniser. No torch."""

from __future__ import annotations

from tok_core.text.detokenise import Detokeniser
from tok_core.text.template import ChatTemplate
from tok_core.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Detokeniser", "Tokenizer"]

"""What a model's directory has for text: its tokenizer and its chat template, as far as they can be used."""

from __future__ import annotations

import logging
from pathlib import Path

from tok_core.errors import ModelError
from tok_core.text.template import ChatTemplate
from tok_core.text.tokenizer import Tokenizer

log = logging.getLogger("tok_core")


def load_text(path: Path) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """Tokenizer and chat template, each None where the directory has none that can be used."""
    try:
        tokenizer = Tokenizer.load(path)
    except ModelError as error:
        log.warning("token ids only, the tokenizer cannot be used: %s", error)
        return None, None
    try:
        return tokenizer, ChatTemplate.load(path)
    except ModelError as error:
        log.warning("no chat, the chat template cannot be used: %s", error)
        return tokenizer, None

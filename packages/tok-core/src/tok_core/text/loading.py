"""Load the tokenizer and the chat template of a model directory."""

from __future__ import annotations

import logging
from pathlib import Path

from tok_core.errors import ModelError
from tok_core.text.template import ChatTemplate
from tok_core.text.tokenizer import Tokenizer

log = logging.getLogger("tok_core")


def load_text(path: Path) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """Return tokenizer and chat template; each is None if the directory has none that is usable."""
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

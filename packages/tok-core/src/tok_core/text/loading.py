"""Load the tokenizer and the chat template of a model directory."""

from __future__ import annotations

import logging
from pathlib import Path

from tok_core.errors import InvalidField, ModelError
from tok_core.text.files import special_tokens
from tok_core.text.template import ChatTemplate
from tok_core.text.tokenizer import Tokenizer

log = logging.getLogger("tok_core")


def load_text(path: Path, template: str | None = None) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """Return tokenizer and chat template; each is None if the directory has none that is usable.

    template  a file with a template in Jinja, or its text, in place of the directory's. Raises InvalidField if it
              cannot be used
    """
    try:
        tokenizer = Tokenizer.load(path)
    except ModelError as error:
        log.warning("token ids only, the tokenizer cannot be used: %s", error)
        return None, None
    if template is not None:
        return tokenizer, _given_template(template, path)
    try:
        return tokenizer, ChatTemplate.load(path)
    except ModelError as error:
        log.warning("no chat, the chat template cannot be used: %s", error)
        return tokenizer, None


def _given_template(template: str, path: Path) -> ChatTemplate:
    """Return the template of a setting, with the special tokens of the directory `path`."""
    is_text = any(mark in template for mark in ("{{", "{%", "\n"))
    try:
        source = template if is_text else Path(template).expanduser().read_text(encoding="utf-8")
        return ChatTemplate({"default": source}, special_tokens(path))
    except (OSError, UnicodeDecodeError, ModelError) as error:
        allowed = f"a file with a template in Jinja, or its text ({error})"
        raise InvalidField("chat_template", template, allowed) from error

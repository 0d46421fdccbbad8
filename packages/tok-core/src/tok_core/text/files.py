"""The JSON files beside a tokenizer: read once, with errors that name the file."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tok_core.errors import ModelError

CONFIG = "tokenizer_config.json"
SPECIAL_MAP = "special_tokens_map.json"


def read_json(directory: Path, name: str) -> dict[str, object]:
    """The object in `directory/name`, empty without such a file. Errors: ModelError naming the file."""
    file = directory / name
    if not file.is_file():
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error


def special_tokens(directory: Path) -> dict[str, str]:
    """Role ("bos_token", "eos_token", ...) to content; a null in tokenizer_config.json says there is none."""
    named = read_json(directory, SPECIAL_MAP) | read_json(directory, CONFIG)
    found = {role: _content(value) for role, value in named.items() if role.endswith("_token")}
    return {role: content for role, content in found.items() if content is not None}


def _content(value: object) -> str | None:
    # Either the token itself, or an object that also says how it is matched in text.
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None

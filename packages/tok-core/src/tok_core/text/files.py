"""Read the JSON files beside a tokenizer; errors name the file."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tok_core.errors import ModelError

CONFIG = "tokenizer_config.json"
SPECIAL_MAP = "special_tokens_map.json"


def read_json(directory: Path, name: str) -> dict[str, object]:
    """Return the object in `directory/name`, or {} without such a file. Raise ModelError naming the file."""
    file = directory / name
    if not file.is_file():
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error


def special_tokens(directory: Path) -> dict[str, str]:
    """Return the special tokens by role ("bos_token", "eos_token", ...). A null in tokenizer_config.json means none."""
    named = read_json(directory, SPECIAL_MAP) | read_json(directory, CONFIG)
    found = {role: _content(value) for role, value in named.items() if role.endswith("_token")}
    return {role: content for role, content in found.items() if content is not None}


def other_special_tokens(directory: Path) -> list[str]:
    """Return special tokens without a role, which tokenizer_config.json lists, or names in an object."""
    config = read_json(directory, CONFIG)
    listed = config.get("extra_special_tokens", config.get("additional_special_tokens"))  # the older name
    values = listed.values() if isinstance(listed, dict) else listed if isinstance(listed, list) else ()
    return [content for value in values if (content := _content(value)) is not None]


def _content(value: object) -> str | None:
    # `value` is the token itself, or an object that also says how the token is matched in text.
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None

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
    except (msgspec.DecodeError, UnicodeDecodeError, OSError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error


def special_tokens(directory: Path) -> dict[str, str]:
    """Return the special tokens by role ("bos_token", "eos_token", ...). A null means none."""
    found = {role: _content(value) for role, value in _settings(directory).items() if role.endswith("_token")}
    return {role: content for role, content in found.items() if content is not None}


def other_special_tokens(directory: Path) -> list[str]:
    """Return special tokens without a role, which the settings list, or name in an object."""
    settings = _settings(directory)
    listed = settings.get("extra_special_tokens", settings.get("additional_special_tokens"))  # the older name
    values = listed.values() if isinstance(listed, dict) else listed if isinstance(listed, list) else ()
    return [content for value in values if (content := _content(value)) is not None]


def _settings(directory: Path) -> dict[str, object]:
    """Return tokenizer_config.json with the entries of special_tokens_map.json, which take precedence.

    As in transformers, a config with `added_tokens_decoder` is complete: the map is not read.
    """
    config = read_json(directory, CONFIG)
    return config if "added_tokens_decoder" in config else config | read_json(directory, SPECIAL_MAP)


def _content(value: object) -> str | None:
    # `value` is the token itself, or an object that also says how the token is matched in text.
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None  # "" means none, too

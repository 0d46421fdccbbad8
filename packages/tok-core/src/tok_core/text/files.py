"""Read the JSON files beside a tokenizer; errors name the file."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tok_core.errors import ModelError

CONFIG = "tokenizer_config.json"
SPECIAL_MAP = "special_tokens_map.json"
TOKENIZER = "tokenizer.json"


def read_json(directory: Path, name: str) -> dict[str, object]:
    """Return the object in `directory/name`, or {} without such a file. Raise ModelError naming the file."""
    file = directory / name
    if not file.is_file():
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError, OSError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    vocab: msgspec.Raw = msgspec.Raw(b"{}")


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []
    model: _Model = msgspec.field(default_factory=_Model)


def end_token_id(directory: Path) -> int | None:
    """Return the id of the tokenizer's end token without loading the tokenizer; None: it has none, or is not usable."""
    try:
        content = special_tokens(directory).get("eos_token")
        if content is None or not (directory / TOKENIZER).is_file():
            return None
        file = msgspec.json.decode((directory / TOKENIZER).read_bytes(), type=_TokenizerFile)
        ids = {token.content: token.id for token in file.added_tokens}
        if content not in ids:
            ids = msgspec.json.decode(file.model.vocab, type=dict[str, int])
    except (ModelError, msgspec.MsgspecError, UnicodeDecodeError, OSError, RecursionError):
        return None
    return ids.get(content)


def with_end_token(ids: tuple[int, ...], directory: Path, vocab_size: int) -> tuple[int, ...]:
    """Return the end ids of a model's configuration and, if the model has it and they lack it, the tokenizer's."""
    own = end_token_id(directory)
    return ids if own is None or own >= vocab_size or own in ids else (*ids, own)


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

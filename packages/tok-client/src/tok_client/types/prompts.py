"""Prompts in the API: a text, a list of texts, the token ids of one prompt, or a list of such lists; no mixture."""

from __future__ import annotations

from typing import cast

Prompts = str | list[str | int | list[int]]
_ALLOWED = "a text, a list of texts, token ids, lists of token ids"


def check_prompts(name: str, value: Prompts) -> None:
    """Raise ValueError if the field `name` is no text or list, mixes kinds or is empty."""
    if isinstance(value, str):
        return
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} is of the type {type(value).__name__}; allowed: {_ALLOWED}")
    kinds = {list if kind is tuple else kind for kind in set(map(type, value))}
    if len(kinds) > 1:
        named = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ValueError(f"{name} mixes {named}; allowed: only strings, only integers, or only lists")
    if not kinds:
        raise ValueError(f"{name} is []; allowed: {_ALLOWED}")


def one_by_one(value: Prompts) -> list[str | list[int]]:
    """Return the prompts of a checked field, each a text or the ids of its tokens."""
    if isinstance(value, str):
        return [value]
    # All elements have one kind, so checking the first avoids a pass over thousands of ids.
    prompts = [value] if isinstance(value[0], int) else value
    return cast("list[str | list[int]]", prompts)

"""Read typed values from a model's JSON files; errors for missing or wrong values name file and key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tok_core.errors import ModelError


class Fields:
    """Values of one JSON object. A key set to null counts as absent, because transformers writes null for unset keys.

    origin  location of the object, for error messages: "…/config.json", "…/config.json: rope_parameters"
    nulls   keys set to null, for the few keys where null differs from absence
    """

    def __init__(self, origin: str, values: Mapping[str, object]) -> None:
        self.origin = origin
        self.values = {key: value for key, value in values.items() if value is not None}
        self.nulls = frozenset(values) - frozenset(self.values)

    @classmethod
    def of_file(cls, path: Path) -> Fields:
        """Read the object in the JSON file at `path`. Raise ModelError if there is none."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
        if not isinstance(values, dict):
            raise ModelError(f"{path}: holds a {type(values).__name__}; expected a JSON object")
        return cls(str(path), values)

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """Return an integer of at least `minimum`. Without a default the key is required."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.wrong(key, value, f"an integer of at least {minimum}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number. Without a default the key is required."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.wrong(key, value, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return a boolean."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of positive numbers. The key is required."""
        value = self._value(key, None)
        if not isinstance(value, list) or not value:
            raise self.wrong(key, value, "a list of positive numbers")
        one_by_one = Fields(f"{self.origin}: {key}", {str(index): item for index, item in enumerate(value)})
        return tuple(one_by_one.number(str(index)) for index in range(len(value)))

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string. Without a default the key is required."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, value, "a string")
        return value

    def texts(self, key: str) -> list[str]:
        """Return a list of strings, empty if the key is absent."""
        value = self.values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, value, "a list of strings")
        return value

    def section(self, key: str) -> Fields | None:
        """Return the object under `key`; None if the key is absent."""
        if key not in self.values:
            return None
        value = self.values[key]
        if not isinstance(value, dict):
            raise self.wrong(key, value, "a JSON object")
        return Fields(f"{self.origin}: {key}", value)

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """Return the token ids under `key`, one or a list; empty if absent. Each must be in the vocabulary."""
        value = self.values.get(key, [])
        ids = value if isinstance(value, list) else [value]
        for item in ids:
            if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < vocab_size:
                raise self.wrong(key, value, f"token ids from 0 to {vocab_size - 1}, one or a list")
        return tuple(dict.fromkeys(ids))

    def wrong(self, key: str, value: object, allowed: str) -> ModelError:
        """Return the error for a value that is not allowed."""
        return ModelError(f"{self.origin}: {key} is {value!r}; allowed: {allowed}")

    def _value(self, key: str, default: object) -> object:
        value = self.values.get(key, default)
        if value is None:
            raise ModelError(f"{self.origin}: {key} is missing")
        return value

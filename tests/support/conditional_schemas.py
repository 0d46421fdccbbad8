"""Generate random JSON schemas of keywords that depend on values: not, if, contains, patternProperties, uniqueItems.

Some are refused and some are unsatisfiable; tests count these.
"""

from __future__ import annotations

import random
from typing import Any

NAMES = ("a", "b", "kind", "x-y")
VALUES = (None, True, False, 0, 1, 1.0, 2, 1.5, "", "a", "b", "x")
PATTERNS = ("^x-", "^x-[a-c]$", "^n[0-9]{1,2}$", "[yz]{2}", "^(?:a|b)$", r"^\w\.$", "q|^r")


def conditional_schema(rng: random.Random) -> Any:
    """Return a schema of few levels, about objects, arrays or few values."""
    return _value(rng, 3)


def _value(rng: random.Random, depth: int) -> Any:
    makers = [_listed, _typed, _bounded]
    if depth:
        makers += [_object, _object, _array, _array, _negated, _conditional, _combined, _combined]
    return rng.choice(makers)(rng, depth)


def _listed(rng: random.Random, depth: int) -> Any:
    values = rng.sample(VALUES, rng.randint(1, 4))
    return {"const": values[0]} if rng.random() < 0.4 else {"enum": values}


def _typed(rng: random.Random, depth: int) -> Any:
    return {"type": rng.choice(["string", "boolean", "null", "integer", ["boolean", "null"], ["string", "integer"]])}


def _bounded(rng: random.Random, depth: int) -> Any:
    low = rng.randint(-2, 3)
    return rng.choice(
        [
            {"type": "integer", "minimum": low, "maximum": low + 3},
            {"type": "number", "minimum": low},
            {"minimum": low},
            {"exclusiveMaximum": low},
            {"type": "string", "minLength": 1, "maxLength": 3},
            {"maxLength": rng.randint(0, 2)},
            {"required": rng.sample(NAMES, 1)},
            True,
            {"not": {"type": "object"}},
        ]
    )


def _object(rng: random.Random, depth: int) -> Any:
    names = rng.sample(NAMES, rng.randint(0, 3))
    found: dict[str, Any] = {"properties": {name: _value(rng, depth - 1) for name in names}}
    if rng.random() < 0.7:
        found["type"] = "object"
    if rng.random() < 0.5:
        found["required"] = [name for name in NAMES if rng.random() < 0.4]
    if rng.random() < 0.3:
        patterns = rng.sample(PATTERNS, rng.randint(1, 2))
        found["patternProperties"] = {pattern: _value(rng, depth - 1) for pattern in patterns}
    if rng.random() < 0.3:
        found["additionalProperties"] = rng.random() < 0.5
    return found


def _array(rng: random.Random, depth: int) -> Any:
    found: dict[str, Any] = {"type": "array"} if rng.random() < 0.8 else {}
    if rng.random() < 0.8:
        found["items"] = _value(rng, depth - 1)
    if rng.random() < 0.4:
        found["contains"] = _value(rng, depth - 1)
        if rng.random() < 0.4:
            found["minContains"] = rng.randint(0, 3)
    elif rng.random() < 0.6:
        found |= {"uniqueItems": True, "items": _listed(rng, 0)}
    if rng.random() < 0.5:
        found["minItems"] = rng.randint(0, 3)
    if rng.random() < 0.5:
        found["maxItems"] = rng.randint(1, 4)
    if "contains" in found and rng.random() < 0.2:
        found["maxContains"] = rng.randint(1, 5)
    return found


def _negated(rng: random.Random, depth: int) -> Any:
    return {"not": _value(rng, depth - 1)}


def _conditional(rng: random.Random, depth: int) -> Any:
    found = {"if": _value(rng, depth - 1)}
    for name in ("then", "else"):
        if rng.random() < 0.7:
            found[name] = _value(rng, depth - 1)
    return found


def _combined(rng: random.Random, depth: int) -> Any:
    parts = [_value(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    return (
        {**_typed(rng, 0), rng.choice(["allOf", "allOf", "anyOf", "oneOf"]): parts}
        if rng.random() < 0.5
        else ({rng.choice(["allOf", "anyOf", "oneOf"]): parts})
    )

"""Generate random JSON schemas that grammars support, and random texts under a grammar."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from tok_core.grammar.compiler import Compiled

Schema = dict[str, Any]
FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid")
PATTERNS = (r"^[A-Z]{3}-\d{2,4}$", r"a(b|cd)*e?", r'^"\\\w$', r"[^a-z\d]{2}", r"\s\S|x\.y", "é{1,2}|日本")
NAMES = ("id", "name", "größe", 'a "b"', "x\\y", "", "日本", "of", "idle")


def random_schema(rng: random.Random) -> Schema:
    """Return a satisfiable schema whose valid texts have at most some hundred characters."""
    return _Maker(rng).whole()


class _Maker:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.defs: dict[str, Schema] = {}

    def whole(self) -> Schema:
        made = self.value(3)
        return {"$defs": self.defs, **made} if self.defs else made

    def value(self, depth: int) -> Schema:
        leaves = (self.integer, self.number, self.string, self.values, self.plain)
        nested = (self.object, self.object, self.array, self.any_of, self.one_of, self.all_of, self.reference)
        make = self.rng.choice(leaves if not depth else (*nested, *leaves))
        made = make(depth)
        if self.rng.random() < 0.2:
            made = {"title": "t", "description": "d", **made}
        return made

    def integer(self, depth: int) -> Schema:
        return {"type": "integer", **self.limits(self.rng.randint(-2000, 2000), self.rng.randint(0, 3000), 1)}

    def number(self, depth: int) -> Schema:
        low = round(self.rng.uniform(-20, 20), self.rng.randint(0, 4))
        return {"type": "number", **self.limits(low, round(self.rng.uniform(1, 9), 2), 0)}

    def limits(self, low: float, width: float, least: float) -> Schema:
        high = round(low + width + 2 * least, 6)
        found: Schema = {}
        if self.rng.random() < 0.6:
            found[self.rng.choice(("minimum", "exclusiveMinimum"))] = low
        if self.rng.random() < 0.6:
            found[self.rng.choice(("maximum", "exclusiveMaximum"))] = high
        if least and len(found) == 2 and width > 100 and self.rng.random() < 0.3:
            found["multipleOf"] = self.rng.randint(5, 40)
        return found

    def string(self, depth: int) -> Schema:
        least = self.rng.randint(0, 3)
        kinds: list[Schema] = [
            {"maxLength": least + self.rng.randint(0, 5), **({"minLength": least} if least else {})},
            {"pattern": self.rng.choice(PATTERNS[:1] + PATTERNS[2:])},
            {"format": self.rng.choice(FORMATS)},
        ]
        return {"type": "string", **self.rng.choice(kinds)}

    def values(self, depth: int) -> Schema:
        values = [None, True, 0, -1.5, "", 'q"\n', "日本", [], [1, {"a": None}], {"k": ["v"]}, {}, 10**12]
        chosen = self.rng.sample(values, self.rng.randint(1, 4))
        return {"const": chosen[0]} if self.rng.random() < 0.3 else {"enum": chosen}

    def plain(self, depth: int) -> Schema:
        return {"type": self.rng.choice(("boolean", "null", ["boolean", "null"]))}

    def object(self, depth: int) -> Schema:
        names = self.rng.sample(NAMES, self.rng.randint(0, 4))
        required = [name for name in names if self.rng.random() < 0.6]
        found: Schema = {"type": "object", "properties": {name: self.value(depth - 1) for name in names}}
        if required or self.rng.random() < 0.5:
            found["required"] = required
        if not names or self.rng.random() < 0.5:
            found["additionalProperties"] = False
        return found

    def array(self, depth: int) -> Schema:
        most = self.rng.randint(0, 3)
        found: Schema = {"type": "array", "items": self.value(depth - 1), "maxItems": most}
        if self.rng.random() < 0.3:
            found["prefixItems"] = [self.value(0), self.value(0)]
        if self.rng.random() < 0.5:
            found["minItems"] = self.rng.randint(0, most)
        return found

    def any_of(self, depth: int) -> Schema:
        return {"anyOf": [self.value(depth - 1) for _ in range(self.rng.randint(1, 3))]}

    def one_of(self, depth: int) -> Schema:
        kinds = self.rng.sample(["cat", "dog", "cow"], self.rng.randint(1, 3))
        return {"oneOf": [self.tagged(kind, depth) for kind in kinds]}

    def tagged(self, kind: str, depth: int) -> Schema:
        properties = {"kind": {"const": kind}, "more": self.value(depth - 1)}
        return {"type": "object", "properties": properties, "required": ["kind"], "additionalProperties": False}

    def all_of(self, depth: int) -> Schema:
        parts = [{"properties": {name: self.value(0)}, "required": [name]} for name in self.rng.sample(NAMES, 2)]
        return {"type": "object", "allOf": [*parts, {"minProperties": 1}]}

    def reference(self, depth: int) -> Schema:
        name = self.rng.choice(("a", "b/c", "d~e"))
        if name not in self.defs:
            self.defs[name] = {}  # registered first, so that nested references do not define it again
            self.defs[name] = self.value(0)
        return {"$ref": f"#/$defs/{name.replace('~', '~0').replace('/', '~1')}"}


def random_text(
    grammar: Compiled, pieces: Sequence[bytes], ends: Sequence[int], rng: random.Random, most: int
) -> bytes:
    """Return the text of random tokens that the grammar allows; tokens that close something are sampled more often.

    Raise AssertionError if the text does not end within `most` tokens.
    """
    matcher, text = grammar.matcher(), b""
    mask = np.zeros((1, len(grammar.first)), np.int32)
    for _ in range(most):
        mask[:] = 0
        matcher.fill_next_token_bitmask(mask)
        allowed = tokens_of(mask[0])
        assert allowed, f"nothing can follow {text!r}"
        if ends[0] in allowed and (rng.random() < 0.5 or set(allowed) <= set(ends)):
            return text
        going = [token for token in allowed if token not in ends]
        closing = [token for token in going if pieces[token][:1] in b'"}]']
        token = rng.choice(closing if closing and rng.random() < 0.25 else going)
        assert matcher.accept_token(token)
        text += pieces[token]
    raise AssertionError(f"{text!r} does not end")


def tokens_of(mask: np.ndarray) -> list[int]:
    """Return the tokens in a packed bitmask."""
    found: list[int] = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist()
    return found

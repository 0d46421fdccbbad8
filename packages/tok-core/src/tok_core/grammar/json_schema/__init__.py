"""Convert JSON schemas to grammars."""

from __future__ import annotations

from tok_core.grammar.json_schema.keywords import Json
from tok_core.grammar.json_schema.schema import SchemaRules

__all__ = [
    "Json",
    "SchemaRules",
]

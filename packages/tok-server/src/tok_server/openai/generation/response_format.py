"""Read the grammar that a request sets for its answer: response_format, structured_outputs, guided_*."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import NamedTuple, cast

import msgspec

from tok_client.types import UNSET, JSONObject, JsonObjectFormat, JsonSchemaFormat, ResponseFormat, StructuredOutputs
from tok_core import InvalidField
from tok_core.sampling_params import Grammar, Kind
from tok_server.openai.generation.job import renamed
from tok_server.openai.generation.params import Request, given
from tok_server.wire import invalid

GUIDED: Mapping[str, Kind] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf",
    "json_object": "json_object",
}
"""Name in `structured_outputs`, and after `guided_` -> the engine's kind of grammar."""
GUIDED_FIELDS: Mapping[str, Kind] = {f"guided_{name}": kind for name, kind in GUIDED.items()}


_FIELDS = attrgetter("response_format", "structured_outputs", *GUIDED_FIELDS)


class Structure(NamedTuple):
    """A grammar, and the path of the field that asks for it."""

    grammar: Grammar
    field: str


def structure_of(request: Request) -> Structure | None:
    """Return the grammar that the request asks for; None: any text. Errors: ApiError."""
    if _FIELDS(request).count(UNSET) == len(GUIDED_FIELDS) + 2:  # the common case: all fields are absent
        return None
    found = list(_asked(request))
    if len(found) > 1:
        both = " and ".join(one.field for one in found[:2])
        raise invalid(found[1].field, f"{both} both say what the answer must be; allowed: one of them")
    return found[0] if found else None


def schema_grammar(schema: JSONObject | bool, field: str = "schema") -> Grammar:
    """Return a grammar of JSON that follows the schema. Errors: ApiError naming the field, for too large a schema."""
    return _grammar("json_schema", msgspec.json.encode(schema).decode(), field)


def ebnf_grammar(rules: str, field: str = "grammar") -> Grammar:
    """Return a grammar of EBNF rules, whose start rule is `root`. Errors: ApiError naming the field."""
    return _grammar("ebnf", rules, field)


def _asked(request: Request) -> Iterator[Structure]:
    asked = cast("ResponseFormat | None", given(request.response_format))
    if asked is not None:
        yield from _of_format(asked)
    outputs: StructuredOutputs | None = given(request.structured_outputs)
    if outputs is not None:
        for name, kind in GUIDED.items():
            yield from _guided(kind, given(getattr(outputs, name)), f"structured_outputs.{name}")
    for name, kind in GUIDED_FIELDS.items():
        value = getattr(request, name)
        if value is not UNSET:
            yield from _guided(kind, value, name)


def _of_format(asked: ResponseFormat) -> Iterator[Structure]:
    if isinstance(asked, JsonObjectFormat):
        yield Structure(Grammar(kind="json_object"), "response_format")
    if isinstance(asked, JsonSchemaFormat):
        field, schema = "response_format.json_schema.schema", given(asked.json_schema.schema)
        if schema is None:
            raise invalid(field, f"{field} is required, but missing")
        yield Structure(schema_grammar(schema, field), field)


def _guided(kind: Kind, value: JSONObject | str | list[str] | bool | None, field: str) -> Iterator[Structure]:
    if value is None or value is False:
        return
    if kind == "json_object":
        yield Structure(Grammar(kind=kind), field)
    else:
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        yield Structure(_grammar(kind, text, field), field)


def _grammar(kind: Kind, value: str, field: str) -> Grammar:
    try:
        return Grammar(kind=kind, value=value)
    except InvalidField as error:
        raise renamed(error, field) from error

"""Read the grammar that a request sets for its answer: response_format, structured_outputs, guided_*."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import NamedTuple, cast

import msgspec

from tok_client.types import UNSET, JSONObject, JsonObjectFormat, JsonSchemaFormat, ResponseFormat, StructuredOutputs
from tok_core import InvalidField
from tok_core.sampling_params import Grammar, Kind
from tok_server.openai.generation.job import invalid_field
from tok_server.openai.generation.params import Request, value_or_none
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


class RequestedFormat(NamedTuple):
    """A grammar, and the path of the field that asks for it."""

    grammar: Grammar
    field: str


def requested_format(request: Request) -> RequestedFormat | None:
    """Return the grammar that the request asks for; None: any text. Errors: ApiError."""
    if _FIELDS(request).count(UNSET) == len(GUIDED_FIELDS) + 2:  # the common case: all fields are absent
        return None
    formats = list(_requested_formats(request))
    if len(formats) > 1:
        both = " and ".join(one.field for one in formats[:2])
        raise invalid(formats[1].field, f"{both} both set the format of the answer; allowed: one of them")
    return formats[0] if formats else None


def schema_grammar(schema: JSONObject | bool, field: str = "schema") -> Grammar:
    """Return a grammar of JSON that follows the schema. Errors: ApiError naming the field, for too large a schema."""
    return _grammar("json_schema", msgspec.json.encode(schema).decode(), field)


def ebnf_grammar(rules: str, field: str = "grammar") -> Grammar:
    """Return a grammar of EBNF rules, whose start rule is `root`. Errors: ApiError naming the field."""
    return _grammar("ebnf", rules, field)


def _requested_formats(request: Request) -> Iterator[RequestedFormat]:
    requested = cast("ResponseFormat | None", value_or_none(request.response_format))
    if requested is not None:
        yield from _response_format(requested)
    outputs: StructuredOutputs | None = value_or_none(request.structured_outputs)
    if outputs is not None:
        for name, kind in GUIDED.items():
            yield from _guided_format(kind, value_or_none(getattr(outputs, name)), f"structured_outputs.{name}")
    for name, kind in GUIDED_FIELDS.items():
        value = getattr(request, name)
        if value is not UNSET:
            yield from _guided_format(kind, value, name)


def _response_format(requested: ResponseFormat) -> Iterator[RequestedFormat]:
    if isinstance(requested, JsonObjectFormat):
        yield RequestedFormat(Grammar(kind="json_object"), "response_format")
    if isinstance(requested, JsonSchemaFormat):
        field, schema = "response_format.json_schema.schema", value_or_none(requested.json_schema.schema)
        if schema is None:
            raise invalid(field, f"{field} is required, but missing")
        yield RequestedFormat(schema_grammar(schema, field), field)


def _guided_format(
    kind: Kind, value: JSONObject | str | list[str] | bool | None, field: str
) -> Iterator[RequestedFormat]:
    if value is None or value is False:
        return
    if kind == "json_object":
        yield RequestedFormat(Grammar(kind=kind), field)
    else:
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        yield RequestedFormat(_grammar(kind, text, field), field)


def _grammar(kind: Kind, value: str, field: str) -> Grammar:
    try:
        return Grammar(kind=kind, value=value)
    except InvalidField as error:
        raise invalid_field(error, field) from error

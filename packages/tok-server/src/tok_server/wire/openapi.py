"""Operation: one endpoint of the API; routes and /openapi.json are made from the same operations.

A module of endpoints has a tuple `OPERATIONS` beside its handlers, which `tok_server.app` joins:

    OPERATIONS = (
        json_post("/v1/things", create, ThingRequest, Thing),
        Operation("GET", "/v1/things", list_things, query=ListThings, answers={200: json_of(ThingList)}, errors=(400,)),
    )

Every URL of the API is therefore in the document. The dashboard is not part of the API. Schemas come from the wire's
own structs.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TypeVar, get_origin

import msgspec
from aiohttp import web

from tok_client.decoders import decoder
from tok_server.wire.errors import OPENAI_ERRORS, OVERLOADED, ErrorFormat, invalid
from tok_server.wire.type_errors import allowed_values

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Json = dict[str, object]

JSON = "application/json"
EVENT_STREAM = "text/event-stream"
# Of every operation: malformed HTTP, no key, forbidden origin, slow or large headers, too many, a defect, no engine.
COMMON_ERRORS = (400, 401, 403, 408, 429, 431, 500, 503)
BODY_ERRORS = (413, 415, 504)  # of every operation with a body: too large, unsupported encoding, not answered in time

_PARAMETER = re.compile(r"\{(?P<name>\w+)(:[^{}]*)?\}")
_SCHEMAS = "#/components/schemas/"
Q = TypeVar("Q", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Media:
    """A body: its content type, and either a wire type or a JSON schema."""

    content_type: str
    kind: object | None = None
    schema: Mapping[str, object] = field(default_factory=dict)


def json_of(kind: object) -> tuple[Media, ...]:
    """Return the media of a JSON body of a wire type."""
    return (Media(JSON, kind),)


def json_or_events(kind: object) -> tuple[Media, ...]:
    """Return the media of JSON of a wire type, or of server-sent events for requests with `stream`."""
    return (Media(JSON, kind), Media(EVENT_STREAM, schema={"type": "string"}))


def raw(content_type: str) -> tuple[Media, ...]:
    """Return the media of bytes or text without a type."""
    return (Media(content_type, schema={"type": "string"}),)


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one URL.

    path     as the router takes it: "/v1/models/{id}", or with a pattern "/v1/models/{id:.+}"
    handler  the first line of its docstring is the summary
    request  content types of the body; empty: no body
    answers  status -> content types, of responses that are not errors
    errors   statuses of errors besides `COMMON_ERRORS` and, with a body, `BODY_ERRORS`
    query    struct whose fields are the query parameters; optional ones have defaults
    error_format  the form of its errors
    """

    method: str
    path: str
    handler: Handler
    answers: Mapping[int, tuple[Media, ...]]
    request: tuple[Media, ...] = ()
    errors: tuple[int, ...] = ()
    query: type[msgspec.Struct] | None = None
    error_format: ErrorFormat = OPENAI_ERRORS

    def route(self) -> web.RouteDef:
        """Return the route for `Application.add_routes`."""
        return web.route(self.method, self.path, self.handler)

    @property
    def url(self) -> str:
        """Return the path without patterns."""
        return _PARAMETER.sub(r"{\g<name>}", self.path)

    @property
    def all_errors(self) -> tuple[int, ...]:
        """Return the statuses of all errors."""
        of_body = BODY_ERRORS if self.request else ()
        return tuple(sorted({*COMMON_ERRORS, *of_body, *self.errors} - self.answers.keys()))


def json_post(
    path: str,
    handler: Handler,
    request: object,
    answer: object,
    *,
    streamed: bool = False,
    errors: tuple[int, ...] = (),
    error_format: ErrorFormat = OPENAI_ERRORS,
) -> Operation:
    """Return a POST whose body and answer are JSON of these types; `streamed`: the answer may be events, too."""
    answers = {200: json_or_events(answer) if streamed else json_of(answer)}
    return Operation("POST", path, handler, answers, json_of(request), errors, error_format=error_format)


def openapi_document(operations: Sequence[Operation], *, version: str, authorised: bool) -> Json:
    """Return the OpenAPI 3.1 document. `authorised`: clients must send a key."""
    kinds = [kind for operation in operations for kind in _kinds(operation)]
    schemas, components = msgspec.json.schema_components(
        kinds, schema_hook=_schema_of, ref_template=_SCHEMAS + "{name}"
    )
    schemas_by_kind = dict(zip(map(_key, kinds), schemas, strict=True))
    paths: dict[str, Json] = {}
    for operation in operations:
        paths.setdefault(operation.url, {})[operation.method.lower()] = _operation(operation, schemas_by_kind)
    result: Json = {
        "openapi": "3.1.0",
        "info": {"title": "tok", "version": version, "description": "Inference in the shape of OpenAI's API."},
        "paths": paths,
        "components": {"schemas": components},
    }
    if authorised:
        result["components"] = {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
        result["security"] = [{"key": []}]
    return result


def _kinds(operation: Operation) -> Iterator[object]:
    for media in (*operation.request, *(media for answer in operation.answers.values() for media in answer)):
        if media.kind is not None:
            yield media.kind
    yield operation.error_format.kind


def _key(kind: object) -> str:
    return repr(kind)


def _schema_of(kind: type) -> Json:
    if kind is object:
        return {"description": "any JSON value"}  # msgspec treats an empty schema as none
    raise NotImplementedError(kind)


def _operation(operation: Operation, schemas_by_kind: Mapping[str, Json]) -> Json:
    summary = (inspect.getdoc(operation.handler) or operation.url).partition("\n")[0]
    result: Json = {
        "operationId": f"{operation.method.lower()}{re.sub(r'[^a-zA-Z0-9]+', '_', operation.url)}".rstrip("_"),
        "summary": summary,
        "responses": {str(status): body for status, body in _responses(operation, schemas_by_kind)},
    }
    if operation.request:
        result["requestBody"] = {"required": True, "content": _content(operation.request, schemas_by_kind)}
    if parameters := [*_path_parameters(operation), *_query_parameters(operation)]:
        result["parameters"] = parameters
    return result


def _responses(operation: Operation, schemas_by_kind: Mapping[str, Json]) -> Iterator[tuple[int, Json]]:
    for status, medias in operation.answers.items():
        yield status, {"description": HTTPStatus(status).phrase, "content": _content(medias, schemas_by_kind)}
    content = _content(json_of(operation.error_format.kind), schemas_by_kind)
    for status in operation.all_errors:
        phrase = "Overloaded" if status == OVERLOADED else HTTPStatus(status).phrase
        yield status, {"description": phrase, "content": content}


def _content(medias: tuple[Media, ...], schemas_by_kind: Mapping[str, Json]) -> Json:
    return {
        media.content_type: {"schema": dict(media.schema) if media.kind is None else schemas_by_kind[_key(media.kind)]}
        for media in medias
    }


def _path_parameters(operation: Operation) -> Iterator[Json]:
    for match in _PARAMETER.finditer(operation.path):
        yield {"name": match["name"], "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _query_parameters(operation: Operation) -> Iterator[Json]:
    for member in msgspec.structs.fields(operation.query) if operation.query else ():
        schema = msgspec.json.schema(member.type, schema_hook=_schema_of)
        yield {"name": member.encode_name, "in": "query", "required": member.required, "schema": schema}


def read_query(request: web.Request, kind: type[Q]) -> Q:
    """Return the query as a `kind`, of whose fields lists may be given several times.

    Errors: ApiError 400 naming the parameter.
    """
    values: dict[str, object] = dict(request.query)
    fields = msgspec.structs.fields(kind)
    known = [field.encode_name for field in fields]
    lists = {field.encode_name for field in fields if get_origin(field.type) is list}
    for name in values:
        if name not in known:
            raise invalid(name[:80], f"{name[:80]!r} is not a parameter of this URL; allowed: {', '.join(known)}")
        if name in lists:
            values[name] = request.query.getall(name)
        elif len(request.query.getall(name)) > 1:
            raise invalid(name, f"{name} is given twice; allowed: once")
    decoder(kind)  # prepares the type under a lock: the conversion is then safe in any thread
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        named = next((name for name in known if f"`$.{name}`" in str(error)), None)
        if named is None:
            raise invalid(None, str(error)) from error
        raise invalid(
            named, f"{named} is {str(values[named])[:80]!r}; allowed: {allowed_values(kind, named)}"
        ) from error

"""Shared code of the endpoints for trainers: check --enable-rl, read bodies, load weights, resume the engine."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
from aiohttp import web

from tok_core import InvalidField, ModelError
from tok_server.http import CONTEXT, Context, read_body
from tok_server.openai import UnsupportedFields, ignored_header, parse_request
from tok_server.wire import ApiError, invalid, invalid_field

R = TypeVar("R", bound=msgspec.Struct)

VLLMMode = Literal["abort", "wait", "keep"]
VLLM_MODES: dict[str, VLLMMode] = {"abort": "abort", "wait": "wait", "keep": "keep"}
"""Modes in which vLLM's endpoints pause the engine or let it sleep: open requests end early, end first, or stay."""


def trainer_context(request: web.Request) -> Context:
    """Return the context of a request. Raise ApiError unless the server serves the endpoints for trainers."""
    context = request.app[CONTEXT]
    if not context.settings.enable_rl:
        message = f"{request.method} {request.path} is served only with --enable-rl"
        raise ApiError(403, message, code="rl_not_enabled")
    context.require_started()
    return context


async def read_fields(
    request: web.Request, context: Context, kind: type[R], unsupported: tuple[UnsupportedFields, ...] = ()
) -> tuple[R, dict[str, str]]:
    """Return the body as a `kind`, and a header that names ignored fields. An empty body has no fields."""
    body = await read_body(request, context)
    fields, ignored = parse_request(body or b"{}", kind, unsupported)
    return fields, ignored_header(context, ignored)


def check_choice(field: str, value: str, allowed: Collection[str]) -> None:
    """Raise ApiError (400) unless the field has an allowed value."""
    if value not in allowed:
        raise invalid(field, f"{field} is {value[:80]!r}; allowed: {', '.join(allowed)}")


async def load_weights(context: Context, field: str, directory: str, version: str | None) -> None:
    """Load the weights in `directory`. Raise ApiError (400) naming `field` if they cannot be loaded."""
    if not directory or not _is_directory(directory):
        raise invalid(field, f"{field} is {directory[:500]!r}; allowed: a directory that the server can read")
    if version == "":
        raise invalid("weight_version", "weight_version is ''; allowed: at least one character")
    try:
        await context.engine.update_weights(str(Path(directory).resolve()), version=version)
    except InvalidField as error:
        raise invalid_field(error, field) from error
    except ModelError as error:
        raise invalid(field, f"{field}: {error}", "weights_refused") from error


def _is_directory(name: str) -> bool:
    try:
        return Path(name).is_dir()
    except OSError:  # the name is too long, or a directory above may not be read
        return False


async def resume_engine(context: Context) -> None:
    """Resume the engine. Raise ApiError (400) if held tensors cannot be applied."""
    try:
        await context.engine.resume()
    except ModelError as error:
        message = f"the engine has resumed with the old weights: {error}"
        raise ApiError(400, message, code="weights_refused") from error

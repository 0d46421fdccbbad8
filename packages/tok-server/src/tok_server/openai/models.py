"""Serve /v1/models: the one served model, by each of its names.

The endpoints answer 503 until the engine has started: clients poll them to wait for a server.
"""

from __future__ import annotations

from aiohttp import web

from tok_client.types import Model, ModelList
from tok_server.http import CONTEXT, Context
from tok_server.openai.generation import check_model
from tok_server.wire import Operation, json_of, json_response


async def list_models(request: web.Request) -> web.Response:
    """Return the list of served models, one for each name of the model."""
    context = request.app[CONTEXT]
    context.require_started()
    return json_response(ModelList(data=[_model(context, name) for name in context.settings.model_names]))


async def retrieve(request: web.Request) -> web.Response:
    """Return the served model, by any of its names."""
    context = request.app[CONTEXT]
    context.require_started()
    name = request.match_info["id"]
    check_model(name, context.settings.model_names)
    return json_response(_model(context, name))


def _model(context: Context, name: str) -> Model:
    max_model_len = context.engine.info.max_model_len
    return Model(id=name, created=context.created, owned_by="tok", max_model_len=max_model_len)


OPERATIONS = (
    Operation("GET", "/v1/models", list_models, answers={200: json_of(ModelList)}),
    Operation("GET", "/v1/models/{id:.+}", retrieve, answers={200: json_of(Model)}, errors=(404,)),
)

"""SGLang's endpoints for trainers: pause, continue, weights from disk, prefix cache, abort, health, load."""

from __future__ import annotations

import asyncio
import time
from typing import Literal

import msgspec
from aiohttp import web

from tok_client.types import WeightVersion
from tok_core import EngineError, SamplingParams
from tok_server.rl.trainer_context import check_choice, load_weights, read_fields, resume_engine, trainer_context
from tok_server.wire import (
    JSON,
    ApiError,
    Media,
    Operation,
    invalid,
    json_of,
    json_post,
    json_response,
    raw,
    unavailable,
)

MODES: dict[str, Literal["abort", "keep", "retract"]] = {"abort": "abort", "in_place": "keep", "retract": "retract"}
HEALTH_SECONDS = 20.0  # time limit of generating one token, as in SGLang


class PauseGenerationRequest(msgspec.Struct, frozen=True):
    """Body of `POST /pause_generation`.

    mode  what happens to open requests. "abort": they end. "in_place": they keep their KV cache. "retract": they drop
          it, and compute it again after the pause
    """

    mode: str = "abort"


class ContinueGenerationRequest(msgspec.Struct, frozen=True):
    """Body of `POST /continue_generation`, which needs no fields."""


class GenerationStatus(msgspec.Struct, frozen=True):
    """Answer of `POST /pause_generation` and `POST /continue_generation`."""

    message: str
    status: str = "ok"


class UpdateWeightsFromDiskRequest(msgspec.Struct, frozen=True):
    """Body of `POST /update_weights_from_disk`.

    keep_pause          leave the engine paused, if the weights are loaded
    abort_all_requests  abort open requests first
    """

    model_path: str
    load_format: str | None = None
    weight_version: str | None = None
    abort_all_requests: bool = False
    flush_cache: bool = True
    keep_pause: bool = False


class WeightsUpdate(msgspec.Struct, frozen=True):
    """Answer of `POST /update_weights_from_disk`, with status 400 if the weights cannot be loaded."""

    success: bool
    message: str
    num_paused_requests: int = 0


class AbortRequest(msgspec.Struct, frozen=True):
    """Body of `POST /abort_request`.

    rid  id of a request to `/generate`. The prompts of a batch have the ids "RID_0", "RID_1", …; RID aborts all of them
    """

    rid: str = ""
    abort_all: bool = False


class ServedModelInfo(msgspec.Struct, frozen=True):
    """Answer of `GET /model_info`."""

    model_path: str
    served_model_name: str
    weight_version: str
    is_generation: bool = True
    has_image_understanding: bool = False
    has_audio_understanding: bool = False


class ReplicaLoads(msgspec.Struct, frozen=True):
    """Load of one replica, in `Loads`. A request counts once, whatever its `n`; `token_usage` is a fraction."""

    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float


class Loads(msgspec.Struct, frozen=True):
    """Answer of `GET /v1/loads`. `timestamp`: seconds since 1970."""

    timestamp: float
    dp_rank_count: int
    loads: list[ReplicaLoads]


async def pause_generation(request: web.Request) -> web.Response:
    """Pause the engine; answers once it computes nothing."""
    context = trainer_context(request)
    fields, headers = await read_fields(request, context, PauseGenerationRequest)
    check_choice("mode", fields.mode, MODES)
    await context.engine.pause(MODES[fields.mode])
    return json_response(GenerationStatus("generation is paused"), headers=headers)


async def continue_generation(request: web.Request) -> web.Response:
    """Resume the engine after a pause."""
    context = trainer_context(request)
    _, headers = await read_fields(request, context, ContinueGenerationRequest)
    await resume_engine(context)
    return json_response(GenerationStatus("generation continues"), headers=headers)


async def update_weights_from_disk(request: web.Request) -> web.Response:
    """Load the weights in a directory into the running model."""
    context = trainer_context(request)
    fields, headers = await read_fields(request, context, UpdateWeightsFromDiskRequest)
    check_choice("load_format", fields.load_format or "auto", ("auto", "safetensors"))
    if not fields.flush_cache:
        message = "flush_cache is false; allowed: true (prefixes cached with older weights are never used)"
        raise invalid("flush_cache", message, "unsupported_parameter")
    engine = context.engine
    if fields.abort_all_requests:
        await engine.abort_all()
    was_paused = engine.is_paused
    if fields.keep_pause:
        await engine.pause("keep")
    paused = engine.open_requests
    try:
        await load_weights(context, "model_path", fields.model_path, fields.weight_version)
    except ApiError as error:
        if fields.keep_pause and not was_paused:
            await resume_engine(context)
        return json_response(WeightsUpdate(False, error.message), 400)
    message = f"the weights are those of {fields.model_path}, version {engine.weight_version}"
    return json_response(WeightsUpdate(True, message, paused), headers=headers)


async def get_weight_version(request: web.Request) -> web.Response:
    """Return the version of the weights."""
    return json_response(WeightVersion(weight_version=trainer_context(request).engine.weight_version))


async def model_info(request: web.Request) -> web.Response:
    """Return the model's name and the version of its weights."""
    context = trainer_context(request)
    engine, (name, *_) = context.engine, context.settings.model_names
    return json_response(ServedModelInfo(engine.info.model_id, name, engine.weight_version))


async def flush_cache(request: web.Request) -> web.Response:
    """Forget all cached prefixes; running requests keep theirs."""
    await trainer_context(request).engine.reset_prefix_cache()
    return web.Response(text="Cache flushed.\n")


async def abort_request(request: web.Request) -> web.Response:
    """Abort all open requests, or the one to /generate with this rid."""
    context = trainer_context(request)
    fields, headers = await read_fields(request, context, AbortRequest)
    if not fields.abort_all and not fields.rid:
        raise invalid("abort_all", "abort_all is false; allowed: true, or a rid")
    if fields.abort_all:
        await context.engine.abort_all()
    else:
        await context.engine.abort(f"{fields.rid}-0")
        await context.engine.abort_prefix(f"{fields.rid}_")
    return web.Response(headers=headers)


async def health_generate(request: web.Request) -> web.Response:
    """Check health by generating a token; a paused or sleeping engine counts as healthy."""
    context = trainer_context(request)
    engine = context.engine
    health = engine.health()
    if context.draining or not health.ok:
        raise unavailable(f"the server is {context.state}", "engine_unavailable")
    if not (engine.is_paused or engine.is_sleeping):
        stream = engine.generate([0], SamplingParams(max_tokens=1), stream=False)
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                await stream.output()
        except (TimeoutError, EngineError) as error:
            raise unavailable(f"no token within {HEALTH_SECONDS:g} s: {error}", "engine_unavailable") from error
        finally:
            stream.abort()
    return web.Response()


async def loads(request: web.Request) -> web.Response:
    """Return the running and waiting requests of each replica, and the usage of its KV cache."""
    context = trainer_context(request)
    page_size = context.engine.info.page_size
    loads = []
    for number, stats in enumerate(context.engine.replica_stats()):
        running, waiting = int(stats["requests_running"]), int(stats["requests_waiting"])
        used, total = int(stats["pages_used"]) * page_size, int(stats["pages_total"]) * page_size
        usage = used / total if total else 0.0
        loads.append(ReplicaLoads(number, running, waiting, running + waiting, used, total, usage))
    return json_response(Loads(time.time(), len(loads), loads))


SGLANG_OPERATIONS = (
    Operation("GET", "/v1/loads", loads, answers={200: json_of(Loads)}),
    json_post("/pause_generation", pause_generation, PauseGenerationRequest, GenerationStatus),
    json_post("/continue_generation", continue_generation, ContinueGenerationRequest, GenerationStatus),
    Operation(
        "POST",
        "/update_weights_from_disk",
        update_weights_from_disk,
        request=json_of(UpdateWeightsFromDiskRequest),
        answers={200: json_of(WeightsUpdate), 400: (Media(JSON, schema={"type": "object"}),)},
    ),
    Operation("GET", "/get_weight_version", get_weight_version, answers={200: json_of(WeightVersion)}),
    Operation("GET", "/model_info", model_info, answers={200: json_of(ServedModelInfo)}),
    Operation("GET", "/get_model_info", model_info, answers={200: json_of(ServedModelInfo)}),
    Operation("GET", "/flush_cache", flush_cache, answers={200: raw("text/plain")}),
    Operation("POST", "/flush_cache", flush_cache, answers={200: raw("text/plain")}),
    Operation(
        "POST",
        "/abort_request",
        abort_request,
        request=json_of(AbortRequest),
        answers={200: raw("text/plain")},
    ),
    Operation("GET", "/health_generate", health_generate, answers={200: raw("text/plain")}),
)

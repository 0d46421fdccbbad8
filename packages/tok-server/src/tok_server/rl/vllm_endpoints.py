"""vLLM's endpoints for trainers: pause, resume, weight updates, prefix cache, world size, server information."""

from __future__ import annotations

from importlib.metadata import version

import msgspec
from aiohttp import web

from tok_client.types import CacheReset, EngineStatus, PausedReport, UpdateWeightsRequest, WorldSize
from tok_server.http import Context
from tok_server.openai import value_or_none
from tok_server.rl.trainer_context import (
    VLLM_MODES,
    check_choice,
    load_weights,
    read_fields,
    resume_engine,
    trainer_context,
)
from tok_server.rl.vllm_transfer import receive_update
from tok_server.wire import Operation, invalid, json_of, json_post, json_response, read_query


class PauseQuery(msgspec.Struct, frozen=True):
    """Query of `POST /pause`.

    mode                        what happens to open requests: "abort", "wait" or "keep"
    clear_cache                 absent: true, except with the mode "keep"
    wait_for_inflight_requests  true: the same as the mode "wait"
    """

    mode: str = "abort"
    clear_cache: bool | None = None
    wait_for_inflight_requests: bool = False


class ResetPrefixCacheQuery(msgspec.Struct, frozen=True):
    """Query of `POST /reset_prefix_cache`."""

    reset_running_requests: bool = False
    reset_external: bool = False


class WorldSizeQuery(msgspec.Struct, frozen=True):
    """Query of `GET /get_world_size`. `include_dp`: count the workers of all replicas, not only of one."""

    include_dp: bool = True


class ServerInfoQuery(msgspec.Struct, frozen=True):
    """Query of `GET /server_info`."""

    config_format: str = "json"


class ServedModelConfig(msgspec.Struct, frozen=True):
    """Part of `ServerInfo`, with vLLM's names."""

    model: str
    dtype: str
    max_model_len: int


class ServedParallelConfig(msgspec.Struct, frozen=True):
    """Part of `ServerInfo`, with vLLM's names."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int


class WeightTransferConfig(msgspec.Struct, frozen=True):
    """Part of `ServerInfo`, with vLLM's names: trainers refuse servers without it."""

    backend: str = "nccl"


class ServedConfig(msgspec.Struct, frozen=True):
    """Part of `ServerInfo`, with vLLM's names."""

    model_config: ServedModelConfig
    parallel_config: ServedParallelConfig
    weight_transfer_config: WeightTransferConfig


class ServerInfo(msgspec.Struct, frozen=True):
    """Answer of `GET /server_info`: fields with SGLang's names, and `vllm_config` with vLLM's."""

    version: str
    model_path: str
    served_model_name: str
    dtype: str
    tp_size: int
    pp_size: int
    dp_size: int
    page_size: int
    context_length: int
    max_running_requests: int
    max_total_num_tokens: int
    weight_version: str
    vllm_config: ServedConfig


async def pause(request: web.Request) -> web.Response:
    """Pause the engine; answers once it computes nothing. New requests wait until `POST /resume`."""
    context = trainer_context(request)
    query = read_query(request, PauseQuery)
    check_choice("mode", query.mode, VLLM_MODES)
    mode = VLLM_MODES["wait" if query.wait_for_inflight_requests else query.mode]
    await context.engine.pause(mode)
    if query.clear_cache is True or (query.clear_cache is None and mode != "keep"):
        await context.engine.reset_prefix_cache()
    return json_response(EngineStatus(status="paused"))


async def resume(request: web.Request) -> web.Response:
    """Resume the engine after a pause."""
    await resume_engine(trainer_context(request))
    return json_response(EngineStatus(status="resumed"))


async def is_paused(request: web.Request) -> web.Response:
    """Return whether the engine is paused."""
    return json_response(PausedReport(is_paused=trainer_context(request).engine.is_paused))


async def update_weights(request: web.Request) -> web.Response:
    """Load the weights in a directory into the running model, or receive a trainer's tensors."""
    context = trainer_context(request)
    fields, headers = await read_fields(request, context, UpdateWeightsRequest)
    directory, info = value_or_none(fields.weight_dir), value_or_none(fields.update_info)
    version = value_or_none(fields.weight_version)
    if (directory is None) == (info is None):
        raise invalid("weight_dir", "allowed: either weight_dir (str) or update_info (object), and not both")
    if info is not None:
        await receive_update(context.engine, info, version)
    elif directory is not None:
        await load_weights(context, "weight_dir", directory, version)
    return json_response(EngineStatus(status="ok"), headers=headers)


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """Forget all cached prefixes; running requests keep theirs."""
    context = trainer_context(request)
    query = read_query(request, ResetPrefixCacheQuery)
    for name in ("reset_running_requests", "reset_external"):
        if getattr(query, name):
            raise invalid(name, f"{name} is true; allowed: false", "unsupported_parameter")
    await context.engine.reset_prefix_cache()
    return json_response(CacheReset(success=True))


async def get_world_size(request: web.Request) -> web.Response:
    """Return the number of workers, of all replicas or of one."""
    context = trainer_context(request)
    info = context.engine.info
    replicas = _replicas(context) if read_query(request, WorldSizeQuery).include_dp else 1
    return json_response(WorldSize(world_size=info.tp * info.pp * replicas))


async def server_info(request: web.Request) -> web.Response:
    """Return the model, its limits, its parallelism and the version of its weights."""
    context = trainer_context(request)
    check_choice("config_format", read_query(request, ServerInfoQuery).config_format, ("json",))
    info, names = context.engine.info, context.settings.model_names
    parallel = ServedParallelConfig(info.tp, info.pp, _replicas(context))
    model = ServedModelConfig(info.model_id, f"torch.{info.dtype}", info.max_model_len)
    report = ServerInfo(
        version=version("tok-server"),
        model_path=info.model_id,
        served_model_name=names[0],
        dtype=info.dtype,
        tp_size=info.tp,
        pp_size=info.pp,
        dp_size=_replicas(context),
        page_size=info.page_size,
        context_length=info.max_model_len,
        max_running_requests=info.max_running,
        max_total_num_tokens=info.kv_cache_tokens,
        weight_version=context.engine.weight_version,
        vllm_config=ServedConfig(model, parallel, WeightTransferConfig()),
    )
    return json_response(report)


def _replicas(context: Context) -> int:
    return len(context.engine.health().replicas)


VLLM_OPERATIONS = (
    Operation("POST", "/pause", pause, query=PauseQuery, answers={200: json_of(EngineStatus)}),
    Operation("POST", "/resume", resume, answers={200: json_of(EngineStatus)}),
    Operation("GET", "/is_paused", is_paused, answers={200: json_of(PausedReport)}),
    json_post("/update_weights", update_weights, UpdateWeightsRequest, EngineStatus),
    Operation(
        "POST",
        "/reset_prefix_cache",
        reset_prefix_cache,
        query=ResetPrefixCacheQuery,
        answers={200: json_of(CacheReset)},
    ),
    Operation(
        "GET",
        "/get_world_size",
        get_world_size,
        query=WorldSizeQuery,
        answers={200: json_of(WorldSize)},
    ),
    *(
        Operation("GET", path, server_info, query=ServerInfoQuery, answers={200: json_of(ServerInfo)})
        for path in ("/server_info", "/get_server_info")
    ),
)

"""vLLM's endpoints for weight updates by a trainer's tensors: join its group; start, receive and finish an update."""

from __future__ import annotations

import threading
from functools import partial
from types import MappingProxyType

import msgspec
from aiohttp import web

from tok_client.types import (
    EngineStatus,
    FinishWeightUpdateRequest,
    InitWeightTransferRequest,
    JSONObject,
    UpdateInfo,
)
from tok_core import AsyncEngine
from tok_core.messages import IpcHandle
from tok_server.openai import value_or_none
from tok_server.rl.tensor_updates import torch_dtype, transfer
from tok_server.rl.trainer_context import check_choice, read_fields, trainer_context
from tok_server.wire import invalid, json_post, json_response

DEFAULT_BUCKET_BYTES = 1 << 30  # as in vLLM
BODY_FIELDS = MappingProxyType(
    {
        "names": "update_info.names",
        "dtypes": "update_info.dtype_names",
        "shapes": "update_info.shapes",
        "handles": "update_info.ipc_handles",
        "group_name": "update_info",
        "version": "weight_version",
        "tensors": "update_info",
    }
)
METHODS = {
    "skyrl_start_weight_update": "is_checkpoint_format",
    "update_weights_nccl": "update_info",
    "skyrl_finish_weight_update": "",
}
"""Methods of /collective_rpc, and the name of each one's argument; "": none."""
GROUP_FIELDS = ("master_address", "master_port", "rank_offset", "world_size")


class StartWeightUpdateRequest(msgspec.Struct, frozen=True):
    """Body of `POST /start_weight_update`. `is_checkpoint_format`: tensors are those of a checkpoint."""

    is_checkpoint_format: bool = True


class CollectiveRpcRequest(msgspec.Struct, frozen=True):
    """Body of `POST /collective_rpc`.

    method  "skyrl_start_weight_update", "update_weights_nccl" or "skyrl_finish_weight_update", as SkyRL sends them
    kwargs  {"is_checkpoint_format": true}, {"update_info": …} or {}
    """

    method: str
    kwargs: JSONObject = {}


class CollectiveRpcResults(msgspec.Struct, frozen=True):
    """Answer of `POST /collective_rpc`: one null for each worker."""

    results: list[None]


async def init_weight_transfer_engine(request: web.Request) -> web.Response:
    """Join the trainer's group, with NCCL on GPUs and gloo on CPUs. Without a group, only CUDA IPC can be used."""
    context = trainer_context(request)
    fields, headers = await read_fields(request, context, InitWeightTransferRequest)
    info = fields.init_info
    address, port = value_or_none(info.master_address), value_or_none(info.master_port)
    offset, size = value_or_none(info.rank_offset), value_or_none(info.world_size)
    if address is not None and port is not None and offset is not None and size is not None:
        if not 0 < port < 65536:
            raise invalid("init_info.master_port", f"init_info.master_port is {port}; allowed: 1 to 65535")
        cancelled = threading.Event()
        join = partial(
            context.engine.weight_transfer.join,
            address,
            port,
            rank_offset=offset,
            world_size=size,
            protocol="vllm",
            bucket_bytes=_bucket_bytes(value_or_none(info.packed_buffer_size_bytes)) if info.packed else 0,
            cancelled=cancelled,
        )
        await transfer(join, "init_info", {name: f"init_info.{name}" for name in GROUP_FIELDS}, cancelled)
    else:
        missing = [name for name in GROUP_FIELDS if value_or_none(getattr(info, name)) is None]
        if len(missing) < len(GROUP_FIELDS):
            name = f"init_info.{missing[0]}"
            raise invalid(name, f"{name} is missing; {', '.join(GROUP_FIELDS)} describe a group together")
    return json_response(EngineStatus(status="Weight transfer initialized"), headers=headers)


async def start_weight_update(request: web.Request) -> web.Response:
    """Open an update: tensors that arrive from now on are applied when it is finished."""
    context = trainer_context(request)
    fields, headers = await read_fields(request, context, StartWeightUpdateRequest)
    await _start(context.engine, fields.is_checkpoint_format)
    return json_response(EngineStatus(status="Weight update started"), headers=headers)


async def finish_weight_update(request: web.Request) -> web.Response:
    """Apply the tensors of an update, in all workers or none."""
    context = trainer_context(request)
    fields, headers = await read_fields(request, context, FinishWeightUpdateRequest)
    await _finish(context.engine, value_or_none(fields.weight_version))
    return json_response(EngineStatus(status="Weight update finished"), headers=headers)


async def collective_rpc(request: web.Request) -> web.Response:
    """Start an update, receive its tensors, or finish it, by the methods of SkyRL's worker extension for vLLM."""
    context = trainer_context(request)
    fields, headers = await read_fields(request, context, CollectiveRpcRequest)
    engine, kwargs = context.engine, fields.kwargs
    check_choice("method", fields.method, METHODS)
    if unknown := kwargs.keys() - {METHODS[fields.method]}:
        raise invalid("kwargs", f"kwargs: {min(unknown)!r}; allowed: {METHODS[fields.method] or 'none'}")
    match fields.method:
        case "skyrl_start_weight_update":
            await _start(engine, kwargs.get("is_checkpoint_format", True) is True)
        case "update_weights_nccl":
            try:
                info = msgspec.convert(kwargs.get("update_info"), UpdateInfo)
            except msgspec.ValidationError as error:
                raise invalid("kwargs.update_info", f"kwargs.update_info: {error}") from error
            await receive_update(engine, info, None)
        case _:
            await _finish(engine, None)
    return json_response(CollectiveRpcResults([None] * (engine.info.tp * engine.info.pp)), headers=headers)


async def _start(engine: AsyncEngine, is_checkpoint_format: bool) -> None:
    if not is_checkpoint_format:
        message = "is_checkpoint_format is false; allowed: true (names and shapes of a checkpoint)"
        raise invalid("is_checkpoint_format", message, "unsupported_parameter")
    await transfer(engine.weight_transfer.start, "is_checkpoint_format")


async def _finish(engine: AsyncEngine, version: str | None) -> None:
    await transfer(lambda: engine.weight_transfer.finish(version), "update_info", BODY_FIELDS)


async def receive_update(engine: AsyncEngine, info: UpdateInfo, version: str | None) -> None:
    """Receive the tensors of an `update_info`. Raise ApiError (400) if they do not fit or do not arrive."""
    if value_or_none(info.ipc_handles_pickled) is not None:
        message = "update_info.ipc_handles_pickled is a pickle, which could run code; allowed: ipc_handles"
        raise invalid("update_info.ipc_handles_pickled", message, "unsupported_parameter")
    packed, size = value_or_none(info.packed), value_or_none(info.packed_buffer_size_bytes)
    handles = value_or_none(info.ipc_handles)
    receive = partial(
        engine.weight_transfer.receive,
        info.names,
        [torch_dtype(name) for name in info.dtype_names],
        info.shapes,
        bucket_bytes=None if packed is None and size is None else _bucket_bytes(size) if packed is not False else 0,
        handles=None
        if handles is None
        else [{uuid: IpcHandle(ipc.handle, ipc.offset) for uuid, ipc in by_gpu.items()} for by_gpu in handles],
        version=version,
    )
    await transfer(receive, "update_info", BODY_FIELDS)


def _bucket_bytes(size: int | None) -> int:
    """Return the requested bucket size, or vLLM's default. Raise ApiError (400) for a size below 1."""
    if size is not None and size < 1:
        raise invalid("packed_buffer_size_bytes", f"packed_buffer_size_bytes is {size}; allowed: integers from 1")
    return DEFAULT_BUCKET_BYTES if size is None else size


VLLM_TRANSFER_OPERATIONS = (
    json_post("/init_weight_transfer_engine", init_weight_transfer_engine, InitWeightTransferRequest, EngineStatus),
    json_post("/start_weight_update", start_weight_update, StartWeightUpdateRequest, EngineStatus),
    json_post("/finish_weight_update", finish_weight_update, FinishWeightUpdateRequest, EngineStatus),
    json_post("/collective_rpc", collective_rpc, CollectiveRpcRequest, CollectiveRpcResults),
)

"""SGLang's endpoints for weight updates by a trainer's tensors: join and leave its group, receive its broadcasts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial

import msgspec
from aiohttp import web

from tok_server.rl.tensor_updates import SAME_NAMES, torch_dtype, transfer
from tok_server.rl.trainer_context import check_choice, read_fields, trainer_context
from tok_server.wire import JSON, ApiError, Media, Operation, invalid, json_of, json_post, json_response

GROUP = "weight_update_group"  # SGLang's default
ONE_BUCKET = 1 << 62  # bucket size in bytes with which all tensors of a call are in one broadcast


class InitWeightsUpdateGroupRequest(msgspec.Struct, frozen=True):
    """Body of `POST /init_weights_update_group`. `backend`: "nccl" on GPUs and "gloo" on CPUs."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = GROUP
    backend: str = "nccl"


class DestroyWeightsUpdateGroupRequest(msgspec.Struct, frozen=True):
    """Body of `POST /destroy_weights_update_group`."""

    group_name: str = GROUP


class UpdateWeightsFromDistributedRequest(msgspec.Struct, frozen=True):
    """Body of `POST /update_weights_from_distributed`.

    load_format  null: one broadcast for each tensor; "flattened_bucket": one broadcast for all tensors of the call
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = GROUP
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    load_format: str | None = None


class UpdateWeightsFromTensorRequest(msgspec.Struct, frozen=True):
    """Body of `POST /update_weights_from_tensor`, which is refused since its tensors are pickled."""

    serialized_named_tensors: list[str] = []


class TransferResult(msgspec.Struct, frozen=True):
    """Answer of these endpoints, with status 400 if the call failed."""

    success: bool
    message: str


async def init_weights_update_group(request: web.Request) -> web.Response:
    """Join a process group of torch.distributed, in which the trainer is rank 0."""
    context = trainer_context(request)
    fields, headers = await read_fields(request, context, InitWeightsUpdateGroupRequest)
    backend = "nccl" if context.engine.info.device.startswith("cuda") else "gloo"
    check_choice("backend", fields.backend, (backend,))
    if not fields.group_name:
        raise invalid("group_name", "group_name is ''; allowed: at least one character")
    if not 0 < fields.master_port < 65536:
        raise invalid("master_port", f"master_port is {fields.master_port}; allowed: 1 to 65535")
    cancelled = threading.Event()
    join = partial(
        context.engine.weight_transfer.join,
        fields.master_address,
        fields.master_port,
        rank_offset=fields.rank_offset,
        world_size=fields.world_size,
        name=fields.group_name,
        cancelled=cancelled,
    )
    return await _answer(join, "master_address", "the group is joined", headers, cancelled=cancelled)


async def destroy_weights_update_group(request: web.Request) -> web.Response:
    """Leave a group."""
    context = trainer_context(request)
    fields, headers = await read_fields(request, context, DestroyWeightsUpdateGroupRequest)
    leave = partial(context.engine.weight_transfer.leave, fields.group_name)
    return await _answer(leave, "group_name", "the group is left", headers)


async def update_weights_from_distributed(request: web.Request) -> web.Response:
    """Receive tensors. A paused engine applies them once all of the model's have arrived, or when it continues."""
    context = trainer_context(request)
    fields, headers = await read_fields(request, context, UpdateWeightsFromDistributedRequest)
    if fields.load_format is not None:
        check_choice("load_format", fields.load_format, ("flattened_bucket",))
    if fields.abort_all_requests:
        await context.engine.abort_all()
    receive = partial(
        context.engine.weight_transfer.receive,
        fields.names,
        [torch_dtype(name) for name in fields.dtypes],
        fields.shapes,
        group=fields.group_name,
        bucket_bytes=0 if fields.load_format is None else ONE_BUCKET,
        version=fields.weight_version or None,
        hold=True,
    )
    return await _answer(receive, "names", "the tensors are received", headers, {"tensors": "names"})


async def update_weights_from_tensor(request: web.Request) -> web.Response:
    """Refuse the call, since pickles are never read."""
    await read_fields(request, trainer_context(request), UpdateWeightsFromTensorRequest)
    message = (
        "serialized_named_tensors are pickles, which could run code; use /update_weights_from_distributed, or "
        "ipc_handles of /update_weights"
    )
    raise invalid("serialized_named_tensors", message, "unsupported_parameter")


async def _answer(
    call: Callable[[], None],
    field: str,
    message: str,
    headers: Mapping[str, str],
    fields: Mapping[str, str] = SAME_NAMES,
    cancelled: threading.Event | None = None,
) -> web.Response:
    """Call a method of `WeightTransfer`, and answer with a TransferResult."""
    try:
        await transfer(call, field, fields, cancelled)
    except ApiError as error:
        return json_response(TransferResult(False, error.message), error.status)
    return json_response(TransferResult(True, message), headers=headers)


ANSWERS = {200: json_of(TransferResult), 400: (Media(JSON, schema={"type": "object"}),)}

SGLANG_TRANSFER_OPERATIONS = (
    *(
        Operation("POST", path, handler, ANSWERS, json_of(kind))
        for path, handler, kind in (
            ("/init_weights_update_group", init_weights_update_group, InitWeightsUpdateGroupRequest),
            ("/destroy_weights_update_group", destroy_weights_update_group, DestroyWeightsUpdateGroupRequest),
            ("/update_weights_from_distributed", update_weights_from_distributed, UpdateWeightsFromDistributedRequest),
        )
    ),
    json_post(
        "/update_weights_from_tensor", update_weights_from_tensor, UpdateWeightsFromTensorRequest, TransferResult
    ),
)

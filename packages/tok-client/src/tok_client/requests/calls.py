"""Make the call of each endpoint of the API from its parameters."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from io import BytesIO
from os import PathLike
from typing import IO, TYPE_CHECKING, cast

import msgspec

from tok_client.requests.bodies import Object, body_of, path_of, query_of
from tok_client.requests.params import (
    BatchParams,
    EmbeddingParams,
    Prompts,
    RerankParams,
    ScoreParams,
    TokenGenerationParams,
    TokenizeParams,
)
from tok_client.transport import Call
from tok_client.types import (
    UNSET,
    AbortRequests,
    Batch,
    BatchList,
    BatchRequest,
    CacheReset,
    DetokenizeRequest,
    DetokenizeResponse,
    EmbeddingList,
    EmbeddingRequest,
    EngineStatus,
    ExpiresAfter,
    FileDeleted,
    FileList,
    FileObject,
    FinishWeightUpdateRequest,
    HealthReport,
    InitWeightTransferRequest,
    LoadReport,
    Model,
    ModelList,
    PausedReport,
    ReadyReport,
    ReplicaReport,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
    SleepReport,
    TokenGeneration,
    TokenGenerationRequest,
    TokenizeRequest,
    TokenizeResponse,
    UpdateWeightsRequest,
    VersionReport,
    WeightVersion,
    WorldSize,
)

if TYPE_CHECKING:
    import aiohttp

UNAVAILABLE = 503  # a status with which /health and /ready answer, too

# Calls without parameters. Some servers answer /health with the status alone, without a body.
MODELS = Call(method="GET", path="/models", kind=ModelList)
HEALTH = Call(
    method="GET",
    path="/health",
    kind=HealthReport,
    at_root=True,
    accepted_statuses=(UNAVAILABLE,),
    default=HealthReport(status="ready"),
)
READY = Call(method="GET", path="/ready", kind=ReadyReport, at_root=True, accepted_statuses=(UNAVAILABLE,))
LOAD = Call(method="GET", path="/load", kind=LoadReport, at_root=True)
VERSION = Call(method="GET", path="/version", kind=VersionReport, at_root=True)
METRICS = Call(method="GET", path="/metrics", kind=str, at_root=True)
RESUME = Call(method="POST", path="/resume", kind=EngineStatus, at_root=True)
PAUSED = Call(method="GET", path="/is_paused", kind=PausedReport, at_root=True)
SLEEPING = Call(method="GET", path="/is_sleeping", kind=SleepReport, at_root=True)
CACHE_RESET = Call(method="POST", path="/reset_prefix_cache", kind=CacheReset, at_root=True)
WEIGHT_VERSION = Call(method="GET", path="/get_weight_version", kind=WeightVersion, at_root=True)
WEIGHT_UPDATE_START = Call(
    method="POST", path="/start_weight_update", kind=EngineStatus, body=b"{}", at_root=True, repeatable=False
)


def embedding(input: Prompts, params: EmbeddingParams, extra: Object | None) -> Call[EmbeddingList]:
    """Return the call of `POST /embeddings`. The default encoding is base64: exact, and shorter than decimals."""
    fields = {"encoding_format": "base64", **params, "input": input}
    body = body_of(EmbeddingRequest, fields, extra)
    return Call(method="POST", path="/embeddings", kind=EmbeddingList, body=body)


def model(model: str) -> Call[Model]:
    """Return the call of `GET /models/{id}`."""
    return Call(method="GET", path=path_of("/models", "model", model), kind=Model)


def file_creation(
    file: str | PathLike[str] | bytes, purpose: str, filename: str | None, expires_after: ExpiresAfter | Object | None
) -> Call[FileObject]:
    """Return the call of `POST /files`. The fields precede the file, for servers that read a form as it arrives."""
    if not isinstance(file, str | bytes | PathLike):
        raise TypeError(f"file is of the type {type(file).__name__}; allowed: the path of a file, or bytes")
    fields = {"purpose": purpose}
    if expires_after is not None:
        members = expires_after if isinstance(expires_after, Mapping) else msgspec.structs.asdict(expires_after)
        fields |= {f"expires_after[{name}]": str(value) for name, value in members.items()}
    name = filename or ("file.jsonl" if isinstance(file, bytes) else os.path.basename(os.fspath(file)))

    def form() -> aiohttp.FormData:
        import aiohttp

        form_data = aiohttp.FormData(quote_fields=False)
        for field, value in fields.items():
            form_data.add_field(field, value)
        opened: IO[bytes] = BytesIO(file) if isinstance(file, bytes) else open(file, "rb")  # noqa: SIM115 - aiohttp closes it
        form_data.add_field("file", opened, filename=name, content_type="application/octet-stream")
        return form_data

    return Call(method="POST", path="/files", kind=FileObject, form=form)


def file_list(after: str | None, limit: int | None, order: str | None, purpose: str | None) -> Call[FileList]:
    """Return the call of `GET /files`."""
    query = query_of(after=after, limit=limit, order=order, purpose=purpose)
    return Call(method="GET", path=f"/files{query}", kind=FileList)


def file(id: str) -> Call[FileObject]:
    """Return the call of `GET /files/{id}`."""
    return Call(method="GET", path=path_of("/files", "file_id", id), kind=FileObject)


def file_content(id: str) -> Call[bytes]:
    """Return the call of `GET /files/{id}/content`."""
    return Call(method="GET", path=path_of("/files", "file_id", id, "/content"), kind=bytes)


def file_deletion(id: str) -> Call[FileDeleted]:
    """Return the call of `DELETE /files/{id}`."""
    return Call(method="DELETE", path=path_of("/files", "file_id", id), kind=FileDeleted)


def batch_creation(params: BatchParams, extra: Object | None) -> Call[Batch]:
    """Return the call of `POST /batches`."""
    body = body_of(BatchRequest, {"completion_window": "24h", **params}, extra)
    return Call(method="POST", path="/batches", kind=Batch, body=body, repeatable=False)


def batch_list(after: str | None, limit: int | None) -> Call[BatchList]:
    """Return the call of `GET /batches`."""
    return Call(method="GET", path=f"/batches{query_of(after=after, limit=limit)}", kind=BatchList)


def batch(id: str) -> Call[Batch]:
    """Return the call of `GET /batches/{id}`."""
    return Call(method="GET", path=path_of("/batches", "batch_id", id), kind=Batch)


def batch_cancellation(id: str) -> Call[Batch]:
    """Return the call of `POST /batches/{id}/cancel`."""
    return Call(method="POST", path=path_of("/batches", "batch_id", id, "/cancel"), kind=Batch)


def tokenization(params: TokenizeParams) -> Call[TokenizeResponse]:
    """Return the call of `POST /tokenize`."""
    body = body_of(TokenizeRequest, cast(Mapping[str, object], params))
    return Call(method="POST", path="/tokenize", kind=TokenizeResponse, body=body, at_root=True)


def detokenization(tokens: Sequence[int], model: str | None) -> Call[DetokenizeResponse]:
    """Return the call of `POST /detokenize`."""
    body = body_of(DetokenizeRequest, {"tokens": tokens, "model": UNSET if model is None else model})
    return Call(method="POST", path="/detokenize", kind=DetokenizeResponse, body=body, at_root=True)


def scoring(params: ScoreParams) -> Call[ScoreResponse]:
    """Return the call of `POST /score`."""
    body = body_of(ScoreRequest, cast(Mapping[str, object], params))
    return Call(method="POST", path="/score", kind=ScoreResponse, body=body, at_root=True)


def reranking(params: RerankParams) -> Call[RerankResponse]:
    """Return the call of `POST /rerank`."""
    body = body_of(RerankRequest, cast(Mapping[str, object], params))
    return Call(method="POST", path="/rerank", kind=RerankResponse, body=body, at_root=True)


def replica_restart(number: int) -> Call[ReplicaReport]:
    """Return the call of `POST /admin/replicas/{number}/restart`."""
    path = f"/admin/replicas/{number}/restart"
    return Call(method="POST", path=path, kind=ReplicaReport, at_root=True, repeatable=False)


def pause(mode: str, clear_cache: bool | None) -> Call[EngineStatus]:
    """Return the call of `POST /pause`."""
    cache = None if clear_cache is None else str(clear_cache).lower()
    return Call(method="POST", path=f"/pause{query_of(mode=mode, clear_cache=cache)}", kind=EngineStatus, at_root=True)


def sleep(level: int, mode: str) -> Call[EngineStatus]:
    """Return the call of `POST /sleep`."""
    return Call(method="POST", path=f"/sleep{query_of(level=level, mode=mode)}", kind=EngineStatus, at_root=True)


def wake_up(tags: Sequence[str] | None) -> Call[EngineStatus]:
    """Return the call of `POST /wake_up`."""
    return Call(method="POST", path=f"/wake_up{query_of(tags=tags)}", kind=EngineStatus, at_root=True)


def weights_update(
    weight_dir: str | PathLike[str] | None, weight_version: str | None, update_info: Object | None
) -> Call[EngineStatus]:
    """Return the call of `POST /update_weights`. Sent twice without a version, it would count two versions."""
    fields = {
        "weight_dir": UNSET if weight_dir is None else os.fspath(weight_dir),
        "update_info": UNSET if update_info is None else update_info,
        "weight_version": UNSET if weight_version is None else weight_version,
    }
    body = body_of(UpdateWeightsRequest, fields)
    again = weight_version is not None and update_info is None
    return Call(method="POST", path="/update_weights", kind=EngineStatus, body=body, at_root=True, repeatable=again)


def weight_transfer_init(init_info: Object) -> Call[EngineStatus]:
    """Return the call of `POST /init_weight_transfer_engine`."""
    body = body_of(InitWeightTransferRequest, {"init_info": init_info})
    return _update_call("/init_weight_transfer_engine", body)


def weight_update_finish(weight_version: str | None) -> Call[EngineStatus]:
    """Return the call of `POST /finish_weight_update`."""
    fields = {"weight_version": UNSET if weight_version is None else weight_version}
    return _update_call("/finish_weight_update", body_of(FinishWeightUpdateRequest, fields))


def _update_call(path: str, body: bytes) -> Call[EngineStatus]:
    return Call(method="POST", path=path, kind=EngineStatus, body=body, at_root=True, repeatable=False)


def world_size(include_dp: bool) -> Call[WorldSize]:
    """Return the call of `GET /get_world_size`."""
    query = "" if include_dp else "?include_dp=false"
    return Call(method="GET", path=f"/get_world_size{query}", kind=WorldSize, at_root=True)


def token_generation(
    token_ids: Sequence[int], sampling_params: Object, params: TokenGenerationParams, *, stream: bool
) -> Call[TokenGeneration]:
    """Return the call of `POST /inference/v1/generate`."""
    given = {name: value for name, value in params.items() if value is not None}
    fields = {"token_ids": list(token_ids), "sampling_params": dict(sampling_params), **given}
    body = body_of(TokenGenerationRequest, {**fields, "stream": True} if stream else fields)
    return Call(method="POST", path="/inference/v1/generate", kind=TokenGeneration, body=body, at_root=True)


def requests_abort(request_ids: Sequence[str]) -> Call[dict[str, str]]:
    """Return the call of `POST /abort_requests`. ValueError: `request_ids` is one text."""
    if isinstance(request_ids, str):  # its characters would be the ids
        raise ValueError("request_ids is one text; allowed: a list of ids")
    body = body_of(AbortRequests, {"request_ids": list(request_ids)})
    return Call(method="POST", path="/abort_requests", kind=dict[str, str], body=body, at_root=True)

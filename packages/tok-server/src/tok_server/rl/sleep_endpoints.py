"""Endpoints of vLLM and SGLang that lend the device's memory to a trainer: sleep and wake up."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import msgspec
from aiohttp import web

from tok_client.types import EngineStatus, SleepReport
from tok_core import EngineError, EngineResumed, InvalidField, ModelError
from tok_core.messages import MemoryTag
from tok_server.http import Context
from tok_server.openai import ignored_header
from tok_server.rl.trainer_context import VLLM_MODES, VLLMMode, check_choice, read_fields, trainer_context
from tok_server.wire import ApiError, Operation, invalid, json_of, json_post, json_response, read_query, unavailable

TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache")
CUDA_GRAPH = "cuda_graph"  # SGLang's tag of the CUDA graphs' memory, which is never released here


class SleepQuery(msgspec.Struct, frozen=True):
    """Query of `POST /sleep`.

    level  1: keep a copy of the weights in the host's memory; 2: drop them
    mode   what happens to open requests: "abort", "wait" or "keep"
    """

    level: int = 1
    mode: str = "abort"


class WakeUpQuery(msgspec.Struct, frozen=True):
    """Query of `POST /wake_up`. `tags`: "weights", "kv_cache", given once for each; absent: both."""

    tags: list[str] = []


class MemoryOccupationRequest(msgspec.Struct, frozen=True):
    """Body of `POST /release_memory_occupation` and `/resume_memory_occupation`.

    tags  "weights", "kv_cache"; null or []: both. "cuda_graph" has no effect: the graphs' memory stays
    """

    tags: list[str] | None = None


async def sleep(request: web.Request) -> web.Response:
    """Release the memory of weights and KV cache. New requests wait until both are restored."""
    context = trainer_context(request)
    query = read_query(request, SleepQuery)
    check_choice("mode", query.mode, VLLM_MODES)
    if query.level not in (1, 2):
        raise invalid("level", f"level is {query.level}; allowed: 1, 2")
    await _sleep(context, query.level, VLLM_MODES[query.mode], None)
    return json_response(EngineStatus(status="asleep"))


async def wake_up(request: web.Request) -> web.Response:
    """Restore the memory of weights, KV cache or both."""
    context = trainer_context(request)
    tags = read_query(request, WakeUpQuery).tags
    await _wake_up(context, _tags(tags) if tags else None)
    return json_response(EngineStatus(status="asleep" if context.engine.is_sleeping else "awake"))


async def is_sleeping(request: web.Request) -> web.Response:
    """Return whether any memory is released."""
    return json_response(SleepReport(is_sleeping=trainer_context(request).engine.is_sleeping))


async def release_memory_occupation(request: web.Request) -> web.Response:
    """Release memory and drop weights. Refused while requests are open, unless the engine is paused."""
    context = trainer_context(request)
    tags, headers = await _memory_tags(request, context)
    engine = context.engine
    if engine.open_requests and not (engine.is_paused or engine.is_sleeping):
        message = f"{engine.open_requests} requests are open; abort them, wait for them or pause the engine before"
        raise ApiError(400, message, code="requests_open")
    await _sleep(context, 2, "keep", tags)
    return _null(headers)


async def resume_memory_occupation(request: web.Request) -> web.Response:
    """Restore memory. Weights are loaded by the next update, or from their directory."""
    context = trainer_context(request)
    tags, headers = await _memory_tags(request, context)
    await _wake_up(context, tags)
    return _null(headers)


def _null(headers: dict[str, str]) -> web.Response:
    """Return the JSON null, as SGLang does: its clients decode the body."""
    return web.json_response(None, headers=headers)


async def _memory_tags(request: web.Request, context: Context) -> tuple[Sequence[MemoryTag] | None, dict[str, str]]:
    fields, headers = await read_fields(request, context, MemoryOccupationRequest)
    if not fields.tags:
        return None, headers
    if CUDA_GRAPH in fields.tags:
        headers = headers or ignored_header(context, [f"tags[{fields.tags.index(CUDA_GRAPH)}]"])
    return _tags(fields.tags, (*TAGS, CUDA_GRAPH)), headers


def _tags(tags: Sequence[str], allowed: Collection[str] = TAGS) -> Sequence[MemoryTag]:
    for tag in tags:
        check_choice("tags", tag, allowed)
    return [tag for tag in TAGS if tag in tags]


async def _sleep(context: Context, level: int, mode: VLLMMode, tags: Sequence[MemoryTag] | None) -> None:
    with _engine_errors("sleep"):
        await context.engine.sleep(level, mode=mode, tags=tags)


async def _wake_up(context: Context, tags: Sequence[MemoryTag] | None) -> None:
    with _engine_errors("wake up"):
        await context.engine.wake_up(tags)


@contextmanager
def _engine_errors(operation: str) -> Iterator[None]:
    """Raise errors of the engine as ApiError: 400 without sleep mode, 503 if memory or dropped weights are missing."""
    try:
        yield
    except InvalidField as error:
        if error.field != "enable_sleep_mode":
            raise
        message = "the server can sleep only if started with --enable-sleep-mode"
        raise ApiError(400, message, code="sleep_mode_not_enabled") from error
    except EngineResumed:
        raise
    except (EngineError, ModelError) as error:
        raise unavailable(f"the engine cannot {operation}: {error}", "memory_unavailable") from error


SLEEP_OPERATIONS = (
    Operation("POST", "/sleep", sleep, query=SleepQuery, answers={200: json_of(EngineStatus)}),
    Operation("POST", "/wake_up", wake_up, query=WakeUpQuery, answers={200: json_of(EngineStatus)}),
    Operation("GET", "/is_sleeping", is_sleeping, answers={200: json_of(SleepReport)}),
    json_post("/release_memory_occupation", release_memory_occupation, MemoryOccupationRequest, None),
    json_post("/resume_memory_occupation", resume_memory_occupation, MemoryOccupationRequest, None),
)

"""Send one benchmark request over HTTP and record the tokens and times of its answer."""

from __future__ import annotations

import time
from dataclasses import dataclass

import aiohttp
import msgspec

from tok_server.bench.workloads.workload import Workload, WorkloadRequest

MAX_QUOTED_BYTES = 200  # bytes of an answer quoted in an error


@dataclass(slots=True)
class BenchAnswer:
    """The outcome of one request. Times are on the monotonic clock; `first` is None unless the answer was streamed."""

    began: float
    ended: float = 0.0
    first: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    samples: int = 0
    stopped: int = 0
    error: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    finish_reason: str | None = None


class _Body(msgspec.Struct):
    """A whole answer, or one event of a stream; texts are skipped."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: object = None


_DECODER = msgspec.json.Decoder(_Body)


def request_body(request: WorkloadRequest, workload: Workload, model: str, *, stream: bool) -> bytes:
    """Return the JSON body of `POST /completions`."""
    fields: dict[str, object] = {
        "model": model,
        "prompt": request.ids,
        "n": request.n,
        "max_tokens": request.max_tokens,
        "temperature": workload.temperature,
        "top_p": workload.top_p,
    }
    if request.ignore_eos:
        fields["ignore_eos"] = True
    if stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    return msgspec.json.encode(fields)


async def send_request(session: aiohttp.ClientSession, url: str, data: bytes, *, stream: bool) -> BenchAnswer:
    """Send one request and read its answer; failures are reported in `error`."""
    answer = BenchAnswer(time.monotonic())
    try:
        async with session.post(url, data=data) as response:
            if response.status != 200:
                answer.error = f"{response.status} {(await response.read())[:MAX_QUOTED_BYTES]!r}"
            elif stream:
                await _read_events(response, answer)
            else:
                _add_body(answer, await response.read())
    except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.ended = time.monotonic()
    if answer.error is None and not answer.output_tokens:
        answer.error = "the answer reports no tokens (usage.completion_tokens)"
    return answer


async def _read_events(response: aiohttp.ClientResponse, answer: BenchAnswer) -> None:
    ended = False
    async for line in response.content:
        if line.startswith(b"data:"):
            event = line[5:].strip()
            if event == b"[DONE]":
                ended = True
            else:
                _add_body(answer, event)
                if answer.first is None and answer.samples:
                    answer.first = time.monotonic()
    if not ended and answer.error is None:
        answer.error = "the stream ended without [DONE]"


def _add_body(answer: BenchAnswer, data: bytes) -> None:
    body = _DECODER.decode(data)
    if body.error is not None:
        answer.error = msgspec.json.encode(body.error)[:MAX_QUOTED_BYTES].decode(errors="replace")
    for choice in body.choices:
        answer.samples = max(answer.samples, choice.index + 1)
        answer.stopped += choice.finish_reason == "stop"
    if body.usage is not None:
        answer.prompt_tokens = body.usage.prompt_tokens
        answer.output_tokens = body.usage.completion_tokens
        details = body.usage.prompt_tokens_details
        answer.cached_tokens = None if details is None else details.cached_tokens

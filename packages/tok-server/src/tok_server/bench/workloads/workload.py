"""Workloads: fixed lists of requests, read from JSONL files.

{"meta": {"name": "mine", "temperature": 0.6, "top_p": 1.0}}                  once, in any place
{"ids": [1, 2, 3], "n": 4, "max_tokens": 64, "ignore_eos": false}             a request
{"rand": [seed, length], "n": 1, "max_tokens": 187, "ignore_eos": true}       a request with a random prompt
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from tok_core import InvalidField, TokError

WORKLOAD_NAMES = ("monkeys", "sharegpt", "decode")
LOW, HIGH = 16, 127_900
"""Random ids lie in [LOW, HIGH), without the special tokens of a vocabulary of 128,256."""

_MASK = (1 << 64) - 1
_GAMMA = np.uint64(0x9E3779B97F4A7C15)


class WorkloadError(TokError):
    """A workload file that cannot be read; the message names file, line, field, value and the allowed values."""


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """A prompt in token ids, its number of samples, their length, and whether they ignore end ids."""

    ids: list[int]
    n: int
    max_tokens: int
    ignore_eos: bool


@dataclass(frozen=True, slots=True)
class Workload:
    """A list of requests with common sampling parameters."""

    name: str
    temperature: float
    top_p: float
    requests: list[WorkloadRequest]

    @property
    def max_sequence_tokens(self) -> int:
        """Return the largest number of tokens of a prompt and its answer together."""
        return max(len(request.ids) + request.max_tokens for request in self.requests)


class _Meta(msgspec.Struct):
    name: str | None = None
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0


class _Line(msgspec.Struct):
    ids: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)] | None = None
    rand: tuple[Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=1)]] | None = None
    n: Annotated[int, Meta(ge=1)] = 1
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    ignore_eos: bool = False
    meta: _Meta | None = None


_ALLOWED = {
    "ids": "a list of integers from 0, not empty",
    "rand": "[seed, length], integers from 0 and 1",
    "n": "integers from 1",
    "max_tokens": "integers from 1",
    "ignore_eos": "true or false",
    "meta": "an object; temperature from 0, top_p above 0 and at most 1",
}


def read_workload(
    source: str,
    directory: Path | None = None,
    *,
    limit: int | None = None,
    n: int | None = None,
    max_tokens: int | None = None,
) -> Workload:
    """Read the workload `source`: a file, or `NAME` for `NAME.jsonl` in `directory`.

    limit       only the first `limit` requests
    n           samples of every request, instead of the file's number
    max_tokens  upper bound on the length of all samples

    Errors: InvalidField if `source` is no workload; WorkloadError if the file has another form.
    """
    file = find_file(source, directory)
    meta = _Meta()
    requests: list[WorkloadRequest] = []
    for location, line in _lines(file):
        if line.meta is not None:
            meta = line.meta
        elif limit is None or len(requests) < limit:
            requests.append(_request(location, line, n, max_tokens))
    if not requests:
        raise WorkloadError(f"{file}: has no requests; allowed: at least one")
    return Workload(meta.name or file.stem, meta.temperature, meta.top_p, requests)


def find_file(source: str, directory: Path | None) -> Path:
    """Return the file of a workload. Errors: InvalidField naming the flag that is missing or wrong."""
    if directory is not None and (found := directory / f"{source}.jsonl").is_file():
        return found
    if source in WORKLOAD_NAMES:
        shown = None if directory is None else str(directory)
        raise InvalidField("workload_dir", shown, f"a directory with {source}.jsonl (it is not part of tok)")
    if not Path(source).is_file():
        raise InvalidField("workload", source, f"{', '.join(WORKLOAD_NAMES)} or a JSONL file")
    return Path(source)


def warm_up_requests(requests: Sequence[WorkloadRequest], sequences: int, max_tokens: int) -> list[WorkloadRequest]:
    """Return warm-up requests: the first requests with `sequences` samples in total, limited to `max_tokens`.

    Their prompts are reversed, so that the prefix cache holds no prefix of a workload prompt afterwards.
    """
    chosen, samples = [], 0
    for request in requests:
        if samples >= sequences:
            break
        n, length = min(request.n, sequences - samples), min(request.max_tokens, max_tokens)
        chosen.append(WorkloadRequest(request.ids[::-1], n, length, request.ignore_eos))
        samples += n
    return chosen


def _lines(file: Path) -> Iterator[tuple[str, _Line]]:
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    location = f"{file}, line {number}"
                    yield location, _parse(location, line)
    except OSError as error:
        raise WorkloadError(f"{file}: cannot be read ({error})") from error


_DECODER = msgspec.json.Decoder(_Line)


def _parse(location: str, line: bytes) -> _Line:
    try:
        return _DECODER.decode(line)
    except msgspec.ValidationError as error:
        _refuse(location, line, error)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{location}: not JSON ({error})") from error


def _refuse(location: str, line: bytes, error: msgspec.ValidationError) -> NoReturn:
    named = re.search(r"\$\.(\w+)", str(error))
    if named is None:
        raise WorkloadError(f"{location}: is not a JSON object") from error
    field = named[1]
    raise WorkloadError(_field_error(location, field, msgspec.json.decode(line)[field])) from error


def _field_error(location: str, field: str, value: object) -> str:
    return f"{location}: {InvalidField(field, value, _ALLOWED[field])}"


def _request(location: str, line: _Line, n: int | None, max_tokens: int | None) -> WorkloadRequest:
    if line.max_tokens is None:
        raise WorkloadError(_field_error(location, "max_tokens", None))
    if line.ids is None and line.rand is None:
        raise WorkloadError(_field_error(location, "ids", None) + f"; or rand: {_ALLOWED['rand']}")
    ids = line.ids if line.ids is not None else random_ids(*line.rand)  # type: ignore[misc]
    length = line.max_tokens if max_tokens is None else min(line.max_tokens, max_tokens)
    return WorkloadRequest(ids, n or line.n, length, line.ignore_eos)


def split_mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the 64-bit numbers mixed as by SplitMix64.

    Source: Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators".
    """
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    return z ^ (z >> np.uint64(31))


def random_ids(seed: int, length: int) -> list[int]:
    """Return ids LOW + mix((seed · 2³² + j + 1) · γ) mod (HIGH − LOW) for j from 0, in 64-bit arithmetic.

    γ and mix are those of SplitMix64.
    """
    first = np.uint64(((seed << 32) + 1) & _MASK)
    z = (np.arange(length, dtype=np.uint64) + first) * _GAMMA  # arrays wrap around silently
    z = split_mix(z)
    ids: list[int] = (z % np.uint64(HIGH - LOW) + np.uint64(LOW)).tolist()
    return ids

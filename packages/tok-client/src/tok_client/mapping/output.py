"""The output file of a `map`: one line per answer, which a later run can continue."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from io import FileIO
from os import PathLike
from typing import IO, Generic, TypeVar

import msgspec

from tok_client.decoders import decoder
from tok_client.mapping.answered_prompts import AnsweredPrompts

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the file. `request` is a digest of the request's body."""

    index: int
    key: str | None = None
    request: str
    answer: msgspec.Raw


class SavedAnswer(msgspec.Struct, Generic[T_co], frozen=True, kw_only=True):
    """One line of an output file: number and key of the prompt, and its answer."""

    index: int
    key: str | None
    answer: T_co


class Output:
    """Writer that appends answers to the file `path`, for one run at a time.

    `resume` cuts off an incomplete last line, which a killed process may leave. OSError: the file cannot be written, or
    (BlockingIOError) another run writes it. ValueError: it is not an output file of `map`.
    """

    def __init__(self, path: str | PathLike[str], *, keyed: bool) -> None:
        self._name = os.fspath(path)
        self._lock = threading.Lock()
        self._file: FileIO | None = open(path, "ab", buffering=0)  # noqa: SIM115 - it is closed by `close`
        self.answered = AnsweredPrompts(self._name, keyed=keyed)
        try:
            _lock_file(self._file, self._name)
        except BaseException:
            self._file.close()
            raise

    def resume(self) -> None:
        """Read the answers of an earlier run. Call this first; a large file takes long."""
        complete_bytes = 0
        with open(self._name, "rb") as file:
            for line in _lines(file, self._name):
                self.answered.add(line.index, line.key, int(line.request, 16))
                complete_bytes = file.tell()
        with self._lock:
            if self._file is not None:
                self._file.truncate(complete_bytes)

    def write(self, index: int, key: str | None, body: bytes, answer: msgspec.Struct) -> None:
        """Append an answer; on return, the operating system has it, so that a killed process loses nothing."""
        encoded = msgspec.Raw(msgspec.json.encode(answer))
        line = Line(index=index, key=key, request=f"{digest(body):016x}", answer=encoded)
        with self._lock:
            self._append(msgspec.json.encode(line) + b"\n")

    def sync(self) -> None:
        """Force the written answers to the disk."""
        with self._lock:
            if self._file is not None:
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Force the file to the disk and close it. Idempotent."""
        with self._lock:
            file, self._file = self._file, None
        if file is not None:
            with file:
                os.fsync(file.fileno())

    def _append(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest and self._file is not None:
            try:
                rest = rest[self._file.write(rest) :]
            except OSError:  # the line may be incomplete, so nothing may be written after it
                self._file.close()
                self._file = None
                raise


def read_answers(path: str | PathLike[str], kind: type[T]) -> Iterator[SavedAnswer[T]]:
    """Yield the answers of an output file, decoded as `kind` (for instance `Completion`), in the order of completion.

    An incomplete last line is left out. OSError: the file cannot be read. ValueError: it is not an output file of
    `map`.
    """
    answers = decoder(kind)
    with open(path, "rb") as file:
        for line in _lines(file, os.fspath(path)):
            yield SavedAnswer(index=line.index, key=line.key, answer=answers.decode(line.answer))


def digest(body: bytes) -> int:
    """Return a 64-bit hash that identifies a request's body; never 0."""
    from hashlib import blake2b  # slow to import

    return int.from_bytes(blake2b(body, digest_size=8).digest(), "big") or 1


def _lines(file: IO[bytes], name: str) -> Iterator[Line]:
    lines = decoder(Line)
    file.seek(0)
    number = 0
    while (data := file.readline()).endswith(b"\n"):
        number += 1
        try:
            line = lines.decode(data)
            int(line.request, 16)
        except ValueError as error:
            raise ValueError(
                f"{name} is not an output file of map: line {number} cannot be decoded: {error}"
            ) from error
        yield line


def _lock_file(file: FileIO, name: str) -> None:
    """Lock the file for this process until it is closed. BlockingIOError: another process holds the lock."""
    if sys.platform == "win32":
        return
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise BlockingIOError(error.errno, "another run is writing this output", name) from error

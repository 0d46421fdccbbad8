"""ProcessExaminer: examines grammars of strangers, by processes with limits that may be lost to them.

A hostile grammar can take hours or all memory. A process that has everything loaded forks for each grammar; the fork
has the limits, and is no loss.
"""

from __future__ import annotations

import os
import selectors
import struct
import subprocess
import sys
import threading
import time
from typing import Final

import msgspec

from tok_core.errors import EngineError
from tok_core.grammar.checker import Task
from tok_core.grammar.kinds import Grammar

PATIENCE: Final = 240.0  # seconds for an answer where the CPU has other things to do, and for a start
LENGTH: Final = struct.Struct("<I")


class ProcessExaminer:
    """Starts its process when it is needed first, and anew after it has died."""

    stoppable = True

    def __init__(self, task: Task) -> None:
        self._task = task
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def examine(self, grammar: Grammar) -> str:
        """See `Examiner`."""
        process = self._process or self._start()
        try:
            return _ask(process, msgspec.msgpack.encode(grammar))
        except OSError as error:
            self._end()
            raise self._failed(f"the process that checks grammars has died: {error}") from error

    def close(self) -> None:
        """See `Examiner`."""
        with self._lock:
            self._closed = True
        self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        # -c rather than -m: found through the parent's import path, wherever the package was loaded from.
        code = f"import sys; sys.path[:] = {sys.path!r}; from tok_core.grammar.child import main; sys.exit(main())"
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},  # a fork has only one
            )
        except OSError as failure:
            raise self._failed(f"grammars cannot be checked: {failure}") from failure
        with self._lock:
            self._process = process
        if self._closed:
            self._end()
            raise self._failed("")
        try:
            error = _ask(process, msgspec.msgpack.encode(self._task))
        except OSError as failure:
            error = str(failure)
        if error:
            self._end()
            raise self._failed(f"grammars cannot be checked: {error}")
        return process

    def _end(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()

    def _failed(self, reason: str) -> EngineError:
        return EngineError("grammars cannot be checked any more: the engine was closed" if self._closed else reason)


def packed(data: bytes) -> bytes:
    """One message of a pipe."""
    return LENGTH.pack(len(data)) + data


def _ask(process: subprocess.Popen[bytes], question: bytes) -> str:
    """The answer. Raises OSError where there is none in time, or the process ends."""
    assert process.stdin is not None
    deadline = time.monotonic() + PATIENCE
    try:
        process.stdin.write(packed(question))
        (length,) = LENGTH.unpack(_exactly(process, LENGTH.size, deadline))
        return _exactly(process, length, deadline).decode()
    except ValueError as error:  # its pipes have been closed
        raise BrokenPipeError(str(error)) from error


def _exactly(process: subprocess.Popen[bytes], size: int, deadline: float) -> bytes:
    assert process.stdout is not None
    found = b""
    with selectors.DefaultSelector() as selector:  # not `select.select`, which knows no descriptors beyond 1023
        selector.register(process.stdout, selectors.EVENT_READ)
        while len(found) < size:
            readable = selector.select(max(0.0, deadline - time.monotonic()))
            data = os.read(process.stdout.fileno(), size - len(found)) if readable else b""
            if not data:
                raise BrokenPipeError("it says nothing more" if readable else f"it has said nothing for {PATIENCE:g} s")
            found += data
    return found

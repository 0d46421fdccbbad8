"""Fork the child processes of engines from a server that has imported torch, which saves each of them 3 s of CPU."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing import process, reduction
from types import SimpleNamespace
from typing import Any

from support.fork_server import fork_server


class ForkedChild:
    """Forked process, with the part of `subprocess.Popen` that tests use: `python -c CODE`, and a pipe as its input.

    The child has this process's environment and standard error, and its standard output unless `stdout` is a pipe.
    """

    def __init__(self, arguments: list[str], stdin: int, stdout: int | None = None) -> None:
        assert arguments[:2] == [sys.executable, "-c"]
        assert stdin == subprocess.PIPE
        assert stdout in (None, subprocess.PIPE)
        read, write = os.pipe()
        self.stdin = os.fdopen(write, "wb")
        printed, output = (None, 1) if stdout is None else os.pipe()
        self.stdout = None if printed is None else os.fdopen(printed)
        self.returncode: int | None = None
        files = [Descriptor(number) for number in (read, output, 2)]
        child = fork_server().Process(target=_run, args=(arguments[2], dict(os.environ), files))
        child.start()
        os.close(read)
        if stdout is not None:
            os.close(output)
        process._children.discard(child)  # type: ignore[attr-defined]  # it would be polled when another one starts
        assert child.pid is not None
        self.pid = child.pid
        self._popen: Any = child._popen  # type: ignore[attr-defined]
        self._ended = threading.Event()
        threading.Thread(target=self._wait, name=f"wait-{self.pid}", daemon=True).start()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("child", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        if not self._ended.is_set():
            self._popen.kill()

    def close(self) -> None:
        """Kill the process, wait for its end, and close the pipes."""
        self.kill()
        self.wait()
        with suppress(BrokenPipeError):
            self.stdin.close()
        if self.stdout is not None:
            self.stdout.close()

    def _wait(self) -> None:
        self.returncode = self._popen.wait()
        self._ended.set()


class Descriptor:
    """File descriptor that a forked process gets a copy of."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return Descriptor.received, (reduction.DupFd(self.number),)

    @staticmethod
    def received(copy: Any) -> Descriptor:
        return Descriptor(copy.detach())


FORKING = SimpleNamespace(Popen=ForkedChild, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)


def _run(code: str, environment: dict[str, str], files: list[Descriptor]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for number, file in enumerate(files):
        os.dup2(file.number, number)
        os.close(file.number)
    sys.stdin = os.fdopen(0, closefd=False)
    exec(code, {"__name__": "__main__"})

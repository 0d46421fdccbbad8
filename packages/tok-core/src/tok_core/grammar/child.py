"""The process that examines grammars: loads all that is needed for it, and forks for each grammar it is sent."""

from __future__ import annotations

import os
import resource
import signal
import sys
from typing import IO, TYPE_CHECKING, Never

import msgspec

from tok_core.grammar.checker import Task, verdict
from tok_core.grammar.examiner import LENGTH, packed
from tok_core.grammar.kinds import Grammar
from tok_core.grammar.lean import preload

if TYPE_CHECKING:
    from tok_core.grammar.compiler import Compiler


def main() -> int:
    """Runs until its standard input ends; answers on what was its standard output."""
    # Signals of a terminal or a service manager reach the whole group: the parent ends its children.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whoever prints does not answer
    questions = sys.stdin.buffer
    task = msgspec.msgpack.decode(_read(questions), type=Task)
    try:
        preload()
        from tok_core.grammar.compiler import Compiler

        compiler = Compiler.load(task.model, task.vocab_size, task.end_ids)
    except Exception as error:
        answers.write(packed(f"{type(error).__name__}: {error}".encode()))
        return 1
    answers.write(packed(b""))
    while data := _read(questions):
        answers.write(packed(_examined(compiler, msgspec.msgpack.decode(data, type=Grammar), task)))
    return 0


def _read(stream: IO[bytes]) -> bytes:
    """One message; b"" at the end of all."""
    head = stream.read(LENGTH.size)
    return stream.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else b""


def _examined(compiler: Compiler, grammar: Grammar, task: Task) -> bytes:
    """The verdict of a fork; where that does not come back, the grammar took too much."""
    reader, writer = os.pipe()
    fork = os.fork()
    if not fork:
        os.close(reader)
        _examine(compiler, grammar, task, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        found = stream.read()
    _, status = os.waitpid(fork, 0)
    return task.too_much.encode() if status else found


def _examine(compiler: Compiler, grammar: Grammar, task: Task, writer: int) -> Never:
    """In the fork, which ends with it, in one way or another."""
    try:
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + task.memory, size + task.memory))
        resource.setrlimit(resource.RLIMIT_CPU, (task.cpu_seconds, task.cpu_seconds))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.write(writer, verdict(compiler, grammar, task).encode())
        os._exit(0)
    finally:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())

"""The process that forks workers: it loads all that grammars need, and forks a worker for each grammar.

A worker compiles its grammar, says whether that can be followed, and follows its sequences if it is asked to. A hostile
grammar can take hours or all memory in a call that nothing interrupts: a worker has limits, and is no loss.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import resource
import signal
import socket
import struct
import sys
import time
from typing import TYPE_CHECKING, Final, Never

import msgspec

from tok_core.grammar.checker import GrammarTask, verdict
from tok_core.grammar.matchers import Followed, MatcherCall, Matchers, Verdict
from tok_core.grammar.xgrammar_imports import preload
from tok_core.sampling_params import Grammar

if TYPE_CHECKING:
    from tok_core.grammar.compiler import Compiler

LENGTH: Final = struct.Struct("<I")
MARK: Final = struct.Struct("<q")
COMPILING, IDLE = -2, -1  # in the place of a marked sequence
NICENESS: Final = 10
NICE_SECONDS: Final = 2.0  # of a CPU after which a worker gives way to all that is not a worker
FLUSH_SECONDS: Final = 2e-3  # after which what has been followed is sent although more is to be
WEIGHED_SECONDS: Final = 5e-4  # of a CPU that a call takes from which on its memory is looked at
WEIGHED_CALLS: Final = 64  # after which it is all the same
PR_SET_PDEATHSIG: Final = 1


class _Meter:
    """The limits of this process: a call that takes too much ends it, and `mark` tells whose it was."""

    def __init__(self, task: GrammarTask, mark: mmap.mmap) -> None:
        self._task = task
        self._mark = mark
        self._statm = os.open("/proc/self/statm", os.O_RDONLY)
        self._seconds: dict[int, float] = {}
        self._tokens: dict[int, int] = {}
        self._bytes: dict[int, int] = {}
        self._start = self._weighed = self._resident()
        self._began = 0.0
        self._calls = 0
        self._nice = False

    def start(self, sequence: int) -> None:
        """See `Meter`."""
        MARK.pack_into(self._mark, 0, sequence)
        # Nothing interrupts a call into xgrammar but a signal that ends the process.
        signal.setitimer(signal.ITIMER_PROF, self._task.token_seconds)
        self._began = time.thread_time()

    def stop(self, sequence: int, tokens: int) -> str:
        """See `Meter`."""
        seconds = time.thread_time() - self._began
        self._seconds[sequence] = total = self._seconds.get(sequence, 0.0) + seconds
        self._tokens[sequence] = count = self._tokens.get(sequence, 0) + tokens
        self._calls += 1
        if not self._nice and self._began > NICE_SECONDS:
            self._nice = True
            os.nice(NICENESS)
        if seconds > WEIGHED_SECONDS or self._calls % WEIGHED_CALLS == 0:
            self._weigh(sequence)
        allowed = self._task.sequence_seconds + count * self._task.mean_seconds
        return self._task.too_slow if total > allowed else ""

    def forget(self, sequence: int) -> None:
        """See `Meter`."""
        for kept in (self._seconds, self._tokens, self._bytes):
            kept.pop(sequence, None)

    def idle(self) -> None:
        """No sequence is being followed."""
        signal.setitimer(signal.ITIMER_PROF, 0)
        MARK.pack_into(self._mark, 0, IDLE)

    def _weigh(self, sequence: int) -> None:
        """Ends the process where it has grown too much; the sequence that grew most has to answer for it."""
        resident = self._resident()
        self._bytes[sequence] = self._bytes.get(sequence, 0) + resident - self._weighed
        self._weighed = resident
        if resident - self._start > self._task.memory // 2:
            largest = max(self._bytes, key=self._bytes.__getitem__)
            MARK.pack_into(self._mark, 0, largest)
            os._exit(1)

    def _resident(self) -> int:
        return int(os.pread(self._statm, 64, 0).split()[1]) * mmap.PAGESIZE


def main(number: int) -> int:
    """Forks until `number`, the descriptor of a socket, ends."""
    # Signals of a terminal or a service manager reach the whole group: the parent ends its children.
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    orders = socket.socket(fileno=number)
    task = msgspec.msgpack.decode(orders.recv(1 << 20), type=GrammarTask)
    os.nice(task.niceness)
    compiler, failed = None, ""
    try:
        preload()
        from tok_core.grammar.compiler import Compiler

        compiler = Compiler.load(task.model, task.vocab_size, task.end_ids, threads=1)
    except Exception as error:
        failed = f"{type(error).__name__}: {error}"
    gc.collect()
    gc.freeze()
    forks: dict[int, int] = {}  # process ids by the parent's numbers for them
    while True:
        data, descriptors, _, _ = socket.recv_fds(orders, 64, 2)
        if not data:
            return 0
        order = int(data)
        if not descriptors:  # it is not wanted any more
            pid = forks.pop(order, None)
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            continue
        parent, pid = os.getpid(), os.fork()
        if not pid:
            end_with(parent)
            orders.close()
            _work(compiler, failed, task, *descriptors)
        forks[order] = pid
        for descriptor in descriptors:
            os.close(descriptor)


def end_with(parent: int) -> None:
    """Have this process end when the process that forked it does, or at once where that has already ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended between the fork and this call, which came too late to be signalled
        os._exit(1)


def _work(compiler: Compiler | None, failed: str, task: GrammarTask, connection: int, shared: int) -> Never:
    """In the fork, which ends with it, in one way or another."""
    try:
        mark = mmap.mmap(shared, mmap.PAGESIZE)
        with socket.socket(fileno=connection) as peer:
            _serve(Channel(peer), mark, compiler, failed, task)
        os._exit(0)
    finally:
        os._exit(1)


def _serve(channel: Channel, mark: mmap.mmap, compiler: Compiler | None, failed: str, task: GrammarTask) -> None:
    data = channel.receive()
    if not data:
        return
    if compiler is None:
        channel.send(Verdict(failed=failed))
        return
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (size + task.memory, size + task.memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, task.cpu_seconds)
    allowed, compiled = verdict(compiler, msgspec.msgpack.decode(data, type=Grammar), task)
    if compiled is None:
        channel.send(Verdict(allowed))
        return
    meter = _Meter(task, mark)
    meter.idle()
    channel.send(Verdict(begin=compiled.begin.tobytes(), first=compiled.first.tobytes()))
    _follow(channel, Matchers(compiled, meter), meter)


def _follow(channel: Channel, matchers: Matchers, meter: _Meter) -> None:
    """Follows what the channel says, until it ends."""
    while data := channel.receive():
        work = msgspec.msgpack.decode(data, type=MatcherCall)
        matchers.end(work.ended)
        followed: list[Followed] = []
        sent = time.monotonic()
        for one in work.follow:
            followed.append(matchers.follow(one))
            if time.monotonic() - sent > FLUSH_SECONDS:
                meter.idle()
                channel.send(matchers.answer(followed))
                followed, sent = [], time.monotonic()
        meter.idle()
        if followed:
            channel.send(matchers.answer(followed))


class Channel:
    """One end of a socket between a worker and whoever it works for: whole messages, that of the worker waiting."""

    def __init__(self, peer: socket.socket) -> None:
        self._socket = peer

    def send(self, message: msgspec.Struct) -> None:
        """One message."""
        data = msgspec.msgpack.encode(message)
        self._socket.sendall(LENGTH.pack(len(data)) + data)

    def receive(self) -> bytes:
        """The next message; b"" where there is none any more."""
        head = self._exactly(LENGTH.size)
        return self._exactly(LENGTH.unpack(head)[0]) if head else b""

    def _exactly(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            data = self._socket.recv(size - len(found))
            if not data:
                return b""
            found += data
        return found


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))

"""Process that loads the grammar compiler once and forks a worker for each grammar.

A worker compiles its grammar, reports whether it can be followed, and advances its sequences on request. A hostile
grammar can take hours or all memory in a call that cannot be interrupted. Workers therefore have limits, and one that
exceeds them dies.
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

from tok_core.grammar.checker import GrammarLimits, verdict
from tok_core.grammar.matchers import FollowResult, MatcherCall, Matchers, Verdict
from tok_core.grammar.xgrammar_imports import preload
from tok_core.sampling_params import Grammar

if TYPE_CHECKING:
    from tok_core.grammar.compiler import Compiler

LENGTH: Final = struct.Struct("<I")  # size in bytes of the message that follows
CURRENT_SEQUENCE: Final = struct.Struct("<q")  # sequence that a worker is advancing, in memory shared with the parent
COMPILING, IDLE = -2, -1  # values of the mark that are no sequence
NICENESS: Final = 10  # of processes that check grammars, and of workers after NICE_SECONDS
NICE_SECONDS: Final = 2.0  # CPU seconds after which a worker lowers its priority
FLUSH_SECONDS: Final = 2e-3  # seconds after which results are sent although more sequences are to be advanced
MIN_MEASURED_CALL_SECONDS: Final = 5e-4  # CPU seconds; memory is measured after each call that takes longer
CALLS_PER_MEMORY_CHECK: Final = 64  # memory is also measured after this many calls, however short
PR_SET_PDEATHSIG: Final = 1


class _Meter:
    """Resource limits of this process.

    A call that exceeds `token_seconds` or the memory limit kills the process; `mark` names the sequence at fault.
    """

    def __init__(self, task: GrammarLimits, mark: mmap.mmap) -> None:
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
        """See `MatcherMeter`."""
        CURRENT_SEQUENCE.pack_into(self._mark, 0, sequence)
        # Only a signal that kills the process interrupts a call into xgrammar.
        signal.setitimer(signal.ITIMER_PROF, self._task.token_seconds)
        self._began = time.thread_time()

    def stop(self, sequence: int, tokens: int) -> str:
        """See `MatcherMeter`."""
        seconds = time.thread_time() - self._began
        self._seconds[sequence] = total = self._seconds.get(sequence, 0.0) + seconds
        self._tokens[sequence] = count = self._tokens.get(sequence, 0) + tokens
        self._calls += 1
        if not self._nice and self._began > NICE_SECONDS:
            self._nice = True
            os.nice(NICENESS)
        if seconds > MIN_MEASURED_CALL_SECONDS or self._calls % CALLS_PER_MEMORY_CHECK == 0:
            self._weigh(sequence)
        allowed = self._task.sequence_seconds + count * self._task.mean_seconds
        return self._task.too_slow if total > allowed else ""

    def drop(self, sequence: int) -> None:
        """See `MatcherMeter`."""
        for kept in (self._seconds, self._tokens, self._bytes):
            kept.pop(sequence, None)

    def idle(self) -> None:
        """Stop the timer and mark the process as idle."""
        signal.setitimer(signal.ITIMER_PROF, 0)
        CURRENT_SEQUENCE.pack_into(self._mark, 0, IDLE)

    def _weigh(self, sequence: int) -> None:
        """Measure memory. If the process has grown too much, mark the sequence that added most and exit."""
        resident = self._resident()
        self._bytes[sequence] = self._bytes.get(sequence, 0) + resident - self._weighed
        self._weighed = resident
        if resident - self._start > self._task.memory // 2:
            largest = max(self._bytes, key=self._bytes.__getitem__)
            CURRENT_SEQUENCE.pack_into(self._mark, 0, largest)
            os._exit(1)

    def _resident(self) -> int:
        return int(os.pread(self._statm, 64, 0).split()[1]) * mmap.PAGESIZE


def main(number: int) -> int:
    """Fork workers, and kill them, as ordered over the socket with descriptor `number`, until it closes."""
    # Signals of a terminal or a service manager reach the whole group, but the parent ends its children itself.
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    orders = socket.socket(fileno=number)
    task = msgspec.msgpack.decode(orders.recv(1 << 20), type=GrammarLimits)
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
    forks: dict[int, int] = {}  # process ids by the parent's worker numbers
    while True:
        data, descriptors, _, _ = socket.recv_fds(orders, 64, 2)
        if not data:
            return 0
        order = int(data)
        if not descriptors:  # an order to kill a worker
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
    """Make this process end when the process that forked it does, or at once if that has already ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call to prctl: no signal will come
        os._exit(1)


def _work(compiler: Compiler | None, failed: str, task: GrammarLimits, connection: int, shared: int) -> Never:
    """Run the worker in the forked process, then exit."""
    try:
        mark = mmap.mmap(shared, mmap.PAGESIZE)
        with socket.socket(fileno=connection) as peer:
            _serve(Channel(peer), mark, compiler, failed, task)
        os._exit(0)
    finally:
        os._exit(1)


def _serve(channel: Channel, mark: mmap.mmap, compiler: Compiler | None, failed: str, task: GrammarLimits) -> None:
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
    """Answer calls from the channel until it closes."""
    while data := channel.receive():
        work = msgspec.msgpack.decode(data, type=MatcherCall)
        matchers.end(work.ended)
        followed: list[FollowResult] = []
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
    """Worker's end of its socket: sends and receives whole messages, each preceded by its size. Blocks."""

    def __init__(self, peer: socket.socket) -> None:
        self._socket = peer

    def send(self, message: msgspec.Struct) -> None:
        """Send one message."""
        data = msgspec.msgpack.encode(message)
        self._socket.sendall(LENGTH.pack(len(data)) + data)

    def receive(self) -> bytes:
        """Return the next message; b"" if the socket has closed."""
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

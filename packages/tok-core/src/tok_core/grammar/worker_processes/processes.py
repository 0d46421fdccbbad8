"""Start the process that forks grammar workers, and exchange messages with the workers."""

from __future__ import annotations

import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Final

import msgspec

from tok_core.errors import EngineError
from tok_core.grammar.checker import GrammarLimits
from tok_core.grammar.matchers import MatcherCall, MatcherReply, Verdict
from tok_core.grammar.worker_processes.worker import COMPILING, CURRENT_SEQUENCE, LENGTH
from tok_core.runtime import close_in_forks
from tok_core.sampling_params import Grammar

PIECE: Final = 1 << 18  # bytes per read from a socket


class WorkerLost(Exception):
    """Error for a worker that has ended.

    sequence  the one that it was advancing, COMPILING, or IDLE
    orphaned  whether the process that forked it has died, and all of its workers with it
    """

    def __init__(self, sequence: int, *, orphaned: bool = False) -> None:
        super().__init__(sequence)
        self.sequence = sequence
        self.orphaned = orphaned


class WorkerProcess:
    """Parent's handle of a worker process. Not thread-safe, apart from `stop`; `send` and `receive` never block.

    orders  socket of the process that has forked it
    """

    def __init__(
        self, processes: WorkerProcesses, orders: socket.socket, number: int, peer: socket.socket, mark: mmap.mmap
    ) -> None:
        self._processes = processes
        self._orders = orders
        self._number = number
        self._socket = peer
        self._mark = mark
        self._unsent = bytearray()
        self.blocked = False  # whether unsent data waits until the socket accepts more
        self._read = bytearray()
        self._begun = False
        self.stopped = False  # whether `stop` was called

    def fileno(self) -> int:
        """Return the file descriptor of the worker's socket."""
        return self._socket.fileno()

    def send(self, work: MatcherCall) -> None:
        """Queue a call for the worker."""
        self._send(msgspec.msgpack.encode(work))

    def receive(self) -> list[Verdict | MatcherReply]:
        """Return the messages since the last call: first a verdict, then replies.

        Raise WorkerLost if the worker has ended and all of its messages have been returned.
        """
        ended = False
        try:
            while data := self._socket.recv(PIECE):
                self._read += data
            ended = True
        except BlockingIOError:
            pass
        except OSError:
            ended = True
        self._flush()
        found = [self._decode(data) for data in self._messages()]
        if ended and not found:
            raise WorkerLost(self.at, orphaned=self._processes.has_died(self._orders))
        return found

    @property
    def at(self) -> int:
        """Return the sequence that the worker is advancing, COMPILING, or IDLE."""
        sequence: int = CURRENT_SEQUENCE.unpack_from(self._mark, 0)[0]
        return sequence

    def stop(self) -> None:
        """Kill the worker, whatever it is doing; from any thread."""
        self.stopped = True
        self._processes.end(self._number)

    def close(self) -> None:
        """Kill the worker and release its resources."""
        self._processes.remove(self)
        self.stop()
        self._socket.close()
        self._mark.close()

    def _decode(self, data: bytes) -> Verdict | MatcherReply:
        if self._begun:
            return msgspec.msgpack.decode(data, type=MatcherReply)
        self._begun = True
        return msgspec.msgpack.decode(data, type=Verdict)

    def _messages(self) -> list[bytes]:
        found, at = [], 0
        while len(self._read) - at >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self._read, at)
            if len(self._read) - at - LENGTH.size < size:
                break
            at += LENGTH.size
            found.append(bytes(self._read[at : at + size]))
            at += size
        del self._read[:at]
        return found

    def _send(self, data: bytes) -> None:
        self._unsent += LENGTH.pack(len(data)) + data
        self._flush()

    def _flush(self) -> None:
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):  # `receive` raises WorkerLost
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        if bool(self._unsent) != self.blocked:
            self.blocked = not self.blocked
            self._processes.watch(self, writing=self.blocked)


def _is_open(orders: socket.socket) -> bool:
    """Return whether the process at the other end is alive.

    The process sends nothing on this socket, so end of file means that it has ended. Its end closes before the sockets
    of its workers do.
    """
    try:
        return bool(orders.recv(1, socket.MSG_DONTWAIT))
    except BlockingIOError:
        return True
    except OSError:
        return False


class WorkerProcesses:
    """Factory of worker processes, one per grammar. Thread-safe.

    The forking process starts with the first grammar, and anew after it has died. `fileno` becomes readable when a
    worker has sent a message or has ended.
    """

    wakes = True

    def __init__(self, task: GrammarLimits) -> None:
        self._task = task
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None
        self._poll = select.epoll()
        self._count = 0
        self._closed = False

    def fileno(self) -> int:
        """Return the descriptor of the epoll object."""
        return self._poll.fileno()

    def begin(self, grammar: Grammar) -> WorkerProcess:
        """Fork a worker that compiles the grammar. Raise EngineError if none can be started."""
        mine, its = socket.socketpair()
        mine.setblocking(False)
        shared = os.memfd_create("grammar")
        try:
            os.ftruncate(shared, mmap.PAGESIZE)
            mark = mmap.mmap(shared, mmap.PAGESIZE)
            CURRENT_SEQUENCE.pack_into(mark, 0, COMPILING)
            orders, number = self._fork(its.fileno(), shared)
        except BaseException:
            mine.close()
            raise
        finally:
            its.close()
            os.close(shared)
        worker = WorkerProcess(self, orders, number, mine, mark)
        self._poll.register(mine.fileno(), select.EPOLLIN)
        worker._send(msgspec.msgpack.encode(grammar))
        return worker

    def watch(self, worker: WorkerProcess, *, writing: bool) -> None:
        """Set whether `fileno` also becomes readable when the worker's socket accepts more data."""
        self._poll.modify(worker.fileno(), select.EPOLLIN | (select.EPOLLOUT if writing else 0))

    def end(self, number: int) -> None:
        """Kill the worker of this number unless it has ended."""
        with self._lock:
            if self._orders is not None:
                with suppress(OSError):
                    self._orders.send(b"%d" % number)

    def remove(self, worker: WorkerProcess) -> None:
        """Stop watching the worker's socket."""
        self._poll.unregister(worker.fileno())

    @property
    def closed(self) -> bool:
        """Return whether `close` was called."""
        with self._lock:
            return self._closed

    def has_died(self, orders: socket.socket) -> bool:
        """Return whether the forking process at the other end of `orders` has died; another may run since."""
        with self._lock:
            return orders is not self._orders or not _is_open(orders)

    def close(self) -> None:
        """Kill all workers and the forking process, for good."""
        with self._lock:
            self._closed = True
            self._end()

    def _fork(self, *descriptors: int) -> tuple[socket.socket, int]:
        """Fork a worker. Return the socket of the process that forks it, and the worker's number."""
        with self._lock:
            if self._closed:
                raise EngineError("grammars cannot be checked any more: the engine was closed")
            self._count += 1
            for _ in range(2):
                try:
                    orders = self._running()
                    socket.send_fds(orders, [b"%d" % self._count], descriptors)
                    return orders, self._count
                except OSError:  # the forking process has died: start a new one, once
                    self._end()
            raise EngineError("grammars cannot be checked: the process that forks workers dies")

    def _running(self) -> socket.socket:
        if self._orders is None:
            self._start()
        assert self._orders is not None
        return self._orders

    def _start(self) -> None:
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # -c rather than -m, so that the child finds the package through the parent's import path.
        code = f"import sys; sys.path[:] = {sys.path!r}; from tok_core.grammar.worker_processes.worker import main; "
        code += f"sys.exit(main({its.fileno()}))"
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # a forked process has only one
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=2,  # printed text goes to stderr
                pass_fds=[its.fileno()],
                env={**os.environ, **threads, "TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "1"},
            )
        except OSError as failure:
            mine.close()
            raise EngineError(f"grammars cannot be checked: {failure}") from failure
        finally:
            its.close()
        close_in_forks(mine)
        mine.send(msgspec.msgpack.encode(self._task))
        self._orders = mine

    def _end(self) -> None:
        process, self._process = self._process, None
        if self._orders is not None:
            self._orders.close()
            self._orders = None
        if process is not None:
            process.send_signal(signal.SIGKILL)  # kills its workers, too; see `end_with`
            process.wait()

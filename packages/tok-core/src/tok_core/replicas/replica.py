"""Replica: start, watch and end one manager and its workers together, as processes or as one thread."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec
import zmq

from tok_core.config import EngineConfig, RankCoordinates
from tok_core.errors import TokError, to_wire
from tok_core.messages import (
    Failed,
    FromProcess,
    ProcessLaunch,
    Receiver,
    Sender,
    ToEngine,
    ToManager,
)
from tok_core.replicas.liveness import Liveness, ReportReader
from tok_core.replicas.local_ports import Closed, LocalPorts
from tok_core.replicas.processes import FAULTY_EXIT_STATUS, write_launch
from tok_core.runtime import ScratchDirectory, close_in_forks, logs_json

log = logging.getLogger("tok_core")

if TYPE_CHECKING:
    from tok_core.manager import Manager

Report = Callable[[ToEngine], None]


class Death(Protocol):
    """Callback for the end of a replica and its reason. `by_request`: a request caused it, rather than a device."""

    def __call__(self, replica: Replica, reason: str, *, by_request: bool = False) -> None: ...


class Replica(Protocol):
    """Interface of a replica for the engine. Reports and the death are delivered on a thread of the replica."""

    def start(self) -> None:
        """Begin the start; an EngineInfo is reported once the replica is ready."""
        ...

    def send(self, messages: Sequence[ToManager]) -> None:
        """Send messages to the manager; from any thread."""
        ...

    def close(self) -> None:
        """End the replica and wait for its end; no death is reported."""
        ...


class ThreadReplica:
    """Replica with manager and worker in a thread of this process; `index` is its number in the engine."""

    def __init__(self, config: EngineConfig, index: int, report: Report, death: Death) -> None:
        self._config = config
        self._index = index
        self._report = report
        self._death = death
        self._ports: LocalPorts | None = None
        self.manager: Manager | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replica", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, messages: Sequence[ToManager]) -> None:
        ports = self._ports
        if ports is not None:  # else the replica has just failed, and its death is about to be reported
            for message in messages:
                ports.submit(message)

    def close(self) -> None:
        self._closed.set()
        if self._ports is not None:
            self._ports.close()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        failed, reason, by_request = None, "", False
        try:
            self._serve()
        except Closed:
            pass
        except BaseException as error:  # else the end of the thread would go unreported
            failed, reason = Failed(*to_wire(error)), f"{type(error).__name__}: {error}"
            known = isinstance(error, TokError)
            if not known:
                log.exception("the replica failed")
            # An error of the worker may be the device's fault; an error of the manager comes from a request.
            by_request = self._ports is not None and not self._ports.computing and not known
        # Free weights and cache before another replica measures memory, and before `close` returns: the thread that
        # closes a dropped engine must not still be freeing tensors when the interpreter exits.
        self._ports = self.manager = None
        if failed is not None:
            self._report(failed)
            self._death(self, reason, by_request=by_request)

    def _serve(self) -> None:
        from tok_core.manager.loop import Manager
        from tok_core.manager.scheduling.steps_in_flight import MIN_QUEUED_STEPS
        from tok_core.replicas.processes.manager_process import load_tokenizer
        from tok_core.worker.startup.setup import set_up

        runner, info = set_up(self._config, self._index)
        # Queue as many steps as LocalPorts does. A number adapted to step times would make the manager aim for a
        # longer queue than LocalPorts ever holds.
        config = msgspec.structs.replace(self._config, run_ahead=self._config.run_ahead or MIN_QUEUED_STEPS)
        self._ports = ports = LocalPorts(runner, config.run_ahead, self._report)
        if self._closed.is_set():
            return
        tokenizer = load_tokenizer(self._config.tokenizer or self._config.model)
        pieces = None if tokenizer is None else tokenizer.pieces
        self.manager = manager = Manager(config, info, ports, pieces, tokenizer=tokenizer, command_ports=ports)
        self._report(info)
        try:
            manager.run()
        finally:
            manager.close()


CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT}
POLL_SECONDS = 0.1  # seconds between checks of heartbeats
KILL_SECONDS = 20.0  # for a killed process to exit; a process inside the kernel or a driver may never exit


class ProcessReplica:
    """Replica of child processes. If any process ends or hangs, all are ended and the death is reported once.

    index     the replica's number in the engine
    children  processes by role: "manager", and "worker" or "worker 0", "worker 1", …
    program   Python code that the children run
    """

    program = "from tok_core.replicas import run_child; run_child()"

    def __init__(self, config: EngineConfig, index: int, report: Report, death: Death) -> None:
        self._config = config
        self._index = index
        self._coordinates = config.rank_coordinates()
        self._death = death
        self._directory = ScratchDirectory("sockets")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._lock = threading.Lock()
        self._ending = False
        self._ended = threading.Event()
        self._read_on = True
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        reports: Receiver[FromProcess] = Receiver(self._context, self._address("reports"), FromProcess)
        self._reports = ReportReader(reports, report)
        self._requests = Sender(self._context, self._address("requests"))
        self._reader = threading.Thread(target=self._read, name="reports", daemon=True)

    def start(self) -> None:
        with self._lock:
            if self._ending:
                return
            for coordinates in self._coordinates:
                self._spawn("worker" if coordinates.workers == 1 else f"worker {coordinates.number}", coordinates)
            self._spawn("manager", None)
            self._liveness = Liveness(self.children, self._config)
            self._reader.start()
        for role in self.children:
            threading.Thread(target=self._watch, args=(role,), name=f"watch-{role}", daemon=True).start()

    def send(self, messages: Sequence[ToManager]) -> None:
        with self._lock:
            if not self._ending:
                self._requests.send(messages)

    def close(self) -> None:
        if self._begin_end():
            self._end()
        else:
            self._ended.wait()

    def _address(self, name: str) -> str:
        return f"ipc://{self._directory.name}/{name}"

    def _spawn(self, role: str, coordinates: RankCoordinates | None) -> None:
        # -c with the parent's import path, not -m, so that the child finds the package wherever the parent loaded it.
        code = f"import sys; sys.path[:] = {sys.path!r}; {self.program}"
        child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
        self.children[role] = child  # before anything that may raise, so that `close` finds it
        assert child.stdin is not None
        close_in_forks(child.stdin)
        write_launch(child.stdin, self._launch(role, coordinates))

    def _launch(self, role: str, coordinates: RankCoordinates | None) -> ProcessLaunch:
        return ProcessLaunch(
            role=role,
            log_level=logging.getLogger("tok_core").getEffectiveLevel(),
            json_log=logs_json(),
            config=self._config,
            replica=self._index,
            coordinates=coordinates,
            requests=self._address("requests"),
            reports=self._address("reports"),
            steps=[self._address(f"steps-{worker.number}") for worker in self._coordinates],
            outputs=self._address("outputs"),
            workers_on_host=self._config.dp * len(self._coordinates),
            rendezvous=f"{self._directory.name}/rendezvous",
        )

    def _read(self) -> None:
        try:
            while self._read_on:
                self._reports.read(self._liveness, POLL_SECONDS)
                if hung := self._liveness.hung:
                    end = partial(self._end_and_report, hung, by_request=hung.startswith("the manager"))
                    threading.Thread(target=end, name="end-replica", daemon=True).start()  # which joins this thread
                    return
        except BaseException:  # reports would go unread: kill the processes, so that `_watch` reports the death
            log.exception("a report of the engine's processes cannot be handled")
            for child in self.children.values():
                child.kill()

    def _watch(self, role: str) -> None:
        status = self.children[role].wait()
        if status < 0:
            reason = f"the {role} process was killed by signal {-status}"
        else:
            reason = f"the {role} process exited with status {status}"
        crashed = status == FAULTY_EXIT_STATUS or -status in CRASHES
        self._end_and_report(reason, by_request=role == "manager" and crashed)

    def _end_and_report(self, reason: str, *, by_request: bool) -> None:
        """End all processes and report the death; only the first call does so."""
        if self._begin_end():
            try:
                self._end()
            finally:
                self._death(self, reason, by_request=by_request)

    def _begin_end(self) -> bool:
        """Return whether this is the first call; the caller then has to end the replica."""
        with self._lock:
            first, self._ending = not self._ending, True
            return first

    def _end(self) -> None:
        try:
            for child in self.children.values():
                child.kill()
            for role, child in self.children.items():
                try:
                    child.wait(KILL_SECONDS)
                except subprocess.TimeoutExpired:
                    log.error("the %s process %d cannot be killed", role, child.pid)
                assert child.stdin is not None
                child.stdin.close()
            self._read_on = False
            if self._reader.is_alive():
                self._reader.join()
            self._clear_up()
        finally:
            self._ended.set()

    def _clear_up(self) -> None:
        self._reports.close()
        self._requests.close(linger=0)
        self._context.term()
        self._directory.cleanup()

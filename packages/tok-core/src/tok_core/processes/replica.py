"""Replica: one manager and its workers, started, watched and ended together — as processes, or as one thread."""

from __future__ import annotations

import logging
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec
import zmq

from tok_core.config import EngineConfig
from tok_core.errors import TokError, to_wire
from tok_core.log_format import is_json
from tok_core.messages import Failed, Launch, ToEngine, ToManager
from tok_core.parallel.place import Place, places
from tok_core.processes.child import write_launch
from tok_core.processes.local import Closed, LocalPorts
from tok_core.processes.sockets import Receiver, Sender

log = logging.getLogger("tok_core")

if TYPE_CHECKING:
    from tok_core.manager.loop import Manager

Report = Callable[[ToEngine], None]
Death = Callable[["Replica", str], None]


class Replica(Protocol):
    """What an engine needs of a replica. Reports and the death come on a thread of the replica's own."""

    def start(self) -> None:
        """Begins; an EngineInfo is reported once it is ready."""
        ...

    def send(self, messages: Sequence[ToManager]) -> None:
        """From any thread."""
        ...

    def close(self) -> None:
        """Ends it and waits for that; no death is reported."""
        ...


class ThreadReplica:
    """Manager and worker in a thread of this process; `index` counts the engine's replicas."""

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
        if ports is not None:  # else it has just failed: its death is about to be told
            for message in messages:
                ports.submit(message)

    def close(self) -> None:
        self._closed.set()
        if self._ports is not None:
            self._ports.close()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            self._serve()
            return
        except Closed:
            return
        except Exception as error:
            failed, reason = Failed(*to_wire(error)), f"{type(error).__name__}: {error}"
            if not isinstance(error, TokError):
                log.exception("the replica failed")
        self._ports = self.manager = None  # lets go of weights and cache before another replica measures memory
        self._report(failed)
        self._death(self, reason)

    def _serve(self) -> None:
        from tok_core.manager.loop import Manager
        from tok_core.manager.run_ahead import FEWEST
        from tok_core.processes.manager import load_tokenizer
        from tok_core.worker.setup import set_up

        runner, info = set_up(self._config, self._index)
        # As many steps as LocalPorts takes; by their times the manager would wait for room that there never is.
        config = msgspec.structs.replace(self._config, run_ahead=self._config.run_ahead or FEWEST)
        self._ports = ports = LocalPorts(runner, config.run_ahead, self._report)
        if self._closed.is_set():
            return
        tokenizer = load_tokenizer(self._config.model)
        pieces = None if tokenizer is None else tokenizer.pieces
        self.manager = manager = Manager(config, info, ports, pieces, tokenizer=tokenizer)
        self._report(info)
        try:
            manager.run()
        finally:
            manager.close()


class ProcessReplica:
    """Manager and workers as child processes. When one ends, the others are ended and the death reported once.

    `index` counts the engine's replicas. `children` are named "manager", and "worker" or "worker 0", "worker 1", …
    `program` is what they run.
    """

    program = "from tok_core.processes.child import main; sys.exit(main())"

    def __init__(self, config: EngineConfig, index: int, report: Report, death: Death) -> None:
        self._config = config
        self._index = index
        self._places = list(places(config.pp, config.tp))
        self._report = report
        self._death = death
        # The path of a local socket has at most some 107 bytes.
        parent = None if len(tempfile.gettempdir()) < 64 else "/tmp"
        self._directory = tempfile.TemporaryDirectory(prefix="tok-", dir=parent, ignore_cleanup_errors=True)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._lock = threading.Lock()
        self._ending = False
        self._ended = threading.Event()
        self._read_on = True
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self._reports: Receiver[ToEngine] = Receiver(self._context, self._address("reports"), ToEngine)
        self._requests = Sender(self._context, self._address("requests"))
        self._reader = threading.Thread(target=self._read, name="reports", daemon=True)

    def start(self) -> None:
        with self._lock:
            if self._ending:
                return
            self._reader.start()
            for place in self._places:
                self._spawn("worker" if place.workers == 1 else f"worker {place.number}", place)
            self._spawn("manager", None)
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

    def _spawn(self, role: str, place: Place | None) -> None:
        # -c rather than -m: found through the parent's import path, wherever the package was loaded from.
        code = f"import sys; sys.path[:] = {sys.path!r}; {self.program}"
        child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
        self.children[role] = child  # before anything that may raise, so that `close` finds it
        assert child.stdin is not None
        write_launch(child.stdin, self._launch(role, place))

    def _launch(self, role: str, place: Place | None) -> Launch:
        return Launch(
            role=role,
            log_level=logging.getLogger("tok_core").getEffectiveLevel(),
            json_log=is_json(),
            config=self._config,
            replica=self._index,
            place=place,
            requests=self._address("requests"),
            reports=self._address("reports"),
            steps=[self._address(f"steps-{one.number}") for one in self._places],
            outputs=self._address("outputs"),
            on_host=self._config.dp * len(self._places),
            rendezvous=f"{self._directory.name}/rendezvous",
        )

    def _read(self) -> None:
        try:
            while self._read_on:
                message = self._reports.wait(0.1)
                if message is not None:
                    self._report(message)
        except Exception:  # nothing would be heard any more: end the processes, and let their watchers tell
            log.exception("a report of the engine's processes cannot be handled")
            for child in self.children.values():
                child.kill()

    def _watch(self, role: str) -> None:
        status = self.children[role].wait()
        if not self._begin_end():
            return
        reason = f"killed by signal {-status}" if status < 0 else f"exited with status {status}"
        self._end()
        self._death(self, f"the {role} process was {reason}" if status < 0 else f"the {role} process {reason}")

    def _begin_end(self) -> bool:
        """Whether the caller is the one to end the replica."""
        with self._lock:
            first, self._ending = not self._ending, True
            return first

    def _end(self) -> None:
        for child in self.children.values():
            child.kill()
        for child in self.children.values():
            child.wait()
            assert child.stdin is not None
            child.stdin.close()
        self._read_on = False
        if self._reader.is_alive():
            self._reader.join()
        try:
            for message in self._reports.all():  # what a dying process had to say
                self._report(message)
        except Exception:
            log.exception("a last report of the engine's processes cannot be handled")
        self._reports.close()
        self._requests.close(linger=0)
        self._context.term()
        self._directory.cleanup()
        self._ended.set()

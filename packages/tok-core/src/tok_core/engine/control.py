"""Pause and resume all replicas, and change their weights together: all of them, or none."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, get_args

from tok_core.engine.dispatcher import Dispatcher
from tok_core.engine.open_requests import OpenRequests
from tok_core.errors import EngineClosed, EngineDead, InvalidField, ModelError, TokError
from tok_core.messages import CommandAction, CommandResult, EngineCommand
from tok_core.replicas import ReplicaSet

PauseMode = Literal["keep", "wait", "abort"]

DRAIN_LOOK = 0.02  # seconds between checks whether requests still run


@dataclass(slots=True)
class _Round:
    """One command, sent to several replicas: the numbers of those that have not answered, and errors of the others."""

    number: int
    waiting: set[int]
    errors: list[TokError] = field(default_factory=list)


class EngineControl:
    """Thread-safe control of all replicas. Operations run one after another, and each blocks until it is done.

    A replica that starts while the engine is paused, or after an update, first gets the commands that the others got.

    changed  the engine's lock, notified of every change here
    abort    aborts requests by their numbers
    """

    def __init__(
        self,
        replica_set: ReplicaSet,
        dispatcher: Dispatcher,
        requests: OpenRequests,
        changed: threading.Condition,
        abort: Callable[[list[int]], None],
    ) -> None:
        self._replica_set = replica_set
        self._dispatcher = dispatcher
        self._requests = requests
        self._changed = changed
        self._abort = abort
        self._operation = threading.RLock()  # taken before the engine's lock
        self._numbers = itertools.count(1)
        self._round: _Round | None = None
        self._weights: str | None = None
        self.paused = False
        self.updates = 0

    @property
    def version(self) -> str:
        """Return the version of the weights in use."""
        return self._requests.weight_version

    def pause(self, mode: PauseMode) -> None:
        """Pause all replicas, and return once none computes."""
        if mode not in get_args(PauseMode):
            raise InvalidField("mode", mode, ", ".join(get_args(PauseMode)))
        with self._operation:
            self._dispatcher.require_ready()
            before = [request.rid for request in self._requests.all()]
            if mode == "wait" and not self.paused:
                self._await_running()
            try:
                with self._changed:
                    self.paused = True
                    self._greet()
                self._command("pause")  # a replica that ends meanwhile is paused when it starts again
            finally:
                self._dispatcher.release()
            if mode == "abort":
                self._abort(before)

    def resume(self) -> None:
        """Let all replicas compute again; without effect if they are not paused."""
        with self._operation, self._changed:
            self.paused = False
            self._greet()
            self._send("resume", self._replica_set.running())

    def clear_cache(self) -> None:
        """Let no request that starts from now on share pages that are cached now."""
        with self._operation:
            self._dispatcher.require_ready()
            self._command("clear_cache")  # a replica that ends meanwhile has no cache

    def update_weights(self, weights: str, version: str | None) -> str:
        """Load the checkpoint in directory `weights` in all replicas, and return its version."""
        with self._operation:
            self._dispatcher.require_ready()
            pausing = not self.paused
            if pausing:
                self.pause("keep")
            try:
                for error in self._command("check_weights", weights):
                    raise error
                self._load(weights)
                self.updates += 1
                version = str(self.updates) if version is None else version
                self._requests.change_weights(version)
                return version
            finally:
                if pausing:
                    self.resume()

    def _load(self, weights: str) -> None:
        """Load the weights in all replicas; if one cannot, load those in use again in the others."""
        old = self._weights
        with self._changed:
            self._weights = weights
            self._greet()
        errors = self._command("load_weights", weights)
        if not errors:
            return
        with self._changed:
            self._weights = old
            self._greet()
        self._command("load_weights", old)
        raise errors[0]

    def take(self, replica: int, result: CommandResult) -> None:
        """Take the answer of a replica."""
        with self._changed:
            self._settle(replica, ModelError(result.error) if result.error else None, result.number)

    def replica_lost(self, replica: int, reason: str) -> None:
        """Take note that a replica has died: it does not answer any more."""
        with self._changed:
            self._settle(replica, EngineDead(f"replica {replica} has ended: {reason}"))

    def _settle(self, replica: int, error: TokError | None, number: int | None = None) -> None:
        current = self._round
        if current is None or replica not in current.waiting or number not in (None, current.number):
            return
        current.waiting.remove(replica)
        if error is not None:
            current.errors.append(error)
        self._changed.notify_all()

    def _await_running(self) -> None:
        """Hold new requests, and wait until all others have ended."""
        self._dispatcher.holding = True
        try:
            while self._dispatcher.any_dispatched():
                if self._replica_set.closed:
                    raise EngineClosed("the engine was closed")
                time.sleep(DRAIN_LOOK)  # polls, since with many open requests a condition would wake all the time
        except BaseException:
            self._dispatcher.release()
            raise

    def _command(self, action: CommandAction, weights: str | None = None) -> list[TokError]:
        """Send a command to all replicas that run, and wait for their answers; return their errors."""
        with self._changed:
            replicas = self._replica_set.running()
            current = self._round = _Round(self._send(action, replicas, weights), set(replicas))
            self._changed.wait_for(lambda: not current.waiting or self._replica_set.closed)
            self._round = None
            if self._replica_set.closed:
                raise EngineClosed("the engine was closed")
            return current.errors

    def _send(self, action: CommandAction, replicas: list[int], weights: str | None = None) -> int:
        number = next(self._numbers)
        for replica in replicas:
            self._replica_set.send(replica, EngineCommand(number, action, weights))
        return number

    def _greet(self) -> None:
        """Set the commands that a replica gets first when it starts."""
        commands = [EngineCommand(next(self._numbers), "pause")] if self.paused else []
        if self._weights is not None:
            commands.append(EngineCommand(next(self._numbers), "load_weights", self._weights))
        self._replica_set.first_messages = tuple(commands)

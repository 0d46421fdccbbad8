"""Pause, resume, update the weights and release the memory of all replicas together: in all of them, or in none."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from tok_core.engine.dispatcher import Dispatcher
from tok_core.engine.open_requests import OpenRequests
from tok_core.engine.weight_transfer import TaskOf, WeightTransfer, require_version
from tok_core.errors import (
    EngineClosed,
    EngineDead,
    EngineError,
    EngineResumed,
    InvalidField,
    ModelError,
    TokError,
)
from tok_core.messages import ApplyStaged, CommandAction, CommandResult, EngineCommand, MemoryTag, MemoryTask
from tok_core.replicas import ReplicaSet

PauseMode = Literal["keep", "wait", "abort", "retract"]
_Urgent = Literal["resume", "pause"]
MEMORY_TAGS: tuple[MemoryTag, ...] = get_args(MemoryTag)

DRAIN_POLL_SECONDS = 0.02  # seconds between checks whether requests still run


@dataclass(slots=True)
class _PendingCommand:
    """A command that was sent to several replicas.

    error_type  class of the errors that replicas answer with
    waiting     replicas that have not answered
    errors      errors of the replicas that have answered or died
    """

    number: int
    error_type: type[TokError]
    waiting: set[int]
    errors: list[TokError] = field(default_factory=list)


class EngineControl:
    """Thread-safe control of all replicas. Operations run one after another, and each blocks until it is done.

    A replica that starts while the engine is paused or sleeps, or after an update, first gets the commands that bring
    it into the same state.

    changed     the engine's lock, notified of every change here
    abort       aborts requests by their numbers
    sleep_mode  whether the engine may sleep

    asleep      tags of the memory that is released
    updates     number of weight updates so far
    deaths      number of replica deaths so far
    """

    def __init__(
        self,
        replica_set: ReplicaSet,
        dispatcher: Dispatcher,
        requests: OpenRequests,
        changed: threading.Condition,
        abort: Callable[[list[int]], None],
        *,
        sleep_mode: bool,
    ) -> None:
        self._replica_set = replica_set
        self._dispatcher = dispatcher
        self._requests = requests
        self._changed = changed
        self._abort = abort
        self.operation = threading.RLock()  # taken before the engine's lock
        self._urgent: list[_Urgent] = []  # operations that wait for the lock, and end the wait of a pause
        self._numbers = itertools.count(1)
        self._pending: _PendingCommand | None = None
        self._weights: str | None = None  # directory of the weights in use; None: the initial weights
        self._from_trainer = False  # the weights came as tensors, which a restarted replica cannot get again
        self._stale_replicas: set[int] = set()  # replicas that have restarted since a trainer's update
        self._sleep_mode = sleep_mode
        self._weights_kept = True  # False: a sleep has dropped the weights
        self.paused = False
        self.asleep: frozenset[MemoryTag] = frozenset()
        self.updates = 0
        self.deaths = 0
        self.transfer = WeightTransfer(self)

    @property
    def version(self) -> str:
        """Return the version of the weights in use."""
        return self._requests.weight_version

    def pause(self, mode: PauseMode) -> None:
        """Pause all replicas, and return once none computes.

        Raises EngineResumed if the engine is resumed while the mode "wait" waits. A pause or sleep of another mode ends
        that wait, too, and both take effect.
        """
        _check_mode(mode)
        with self._urgently("pause", mode):
            self._dispatcher.require_ready()
            open_before = [request.rid for request in self._requests.all()]
            if mode == "wait" and not (self.paused or self.asleep):
                self._await_running()
            try:
                with self._changed:
                    self.paused = True
                    self._set_first_messages()
                self._command("pause")  # a replica that ends meanwhile is paused when it starts again
            finally:
                self._dispatcher.release()
            if mode == "abort":
                self._abort(open_before)
            if mode == "retract":
                self._command("retract")

    def resume(self) -> None:
        """Let all replicas compute again; without effect if they are not paused.

        Replicas that have restarted since a trainer's update stay paused. Raises ModelError if held tensors cannot be
        applied; the engine then resumes with the old weights.
        """
        with self._urgently("resume"):
            try:
                self.transfer.finish_held()
            finally:
                with self._changed:
                    self.paused = False
                    self._set_first_messages()
                    running = self._replica_set.running()
                    self._send("resume", [replica for replica in running if replica not in self._stale_replicas])

    def clear_cache(self) -> None:
        """Let requests that start from now on share no page that is cached now."""
        with self.operation:
            self._dispatcher.require_ready()
            self._command("clear_cache")  # a replica that ends meanwhile has no cache

    def update_weights(self, weights: str, version: str | None) -> str:
        """Load the checkpoint in directory `weights` in all replicas, and return its version."""
        if not isinstance(weights, str) or not weights:
            raise InvalidField("directory", weights, "the path of a directory, as text")
        require_version(version)
        weights = str(Path(weights).expanduser().absolute())  # other processes may have another current directory
        with self.operation:
            self._dispatcher.require_ready()
            if "weights" in self.asleep:
                raise InvalidField("directory", weights, 'none, as the weights sleep; call wake_up(["weights"]) first')
            with self._paused("keep"):
                for error in self._command("check_weights", weights):
                    raise error
                self._load(weights)
                self.transfer.supersede()
                return self._set_version(version)

    def apply_staged(self, version: str | None, deaths: int) -> None:
        """Let all replicas write the tensors that they have staged, as weights of `version`.

        deaths  the value of `self.deaths` before the replicas began to stage

        Raises ModelError if a replica has died since or is starting, and InvalidField while the weights sleep.
        """
        with self.operation:
            if "weights" in self.asleep:
                raise InvalidField("tensors", "sent", 'none, as the weights sleep; call wake_up(["weights"]) first')
            with self._paused("keep"):
                with self._changed:
                    if self.deaths != deaths or any(
                        record.state in ("starting", "restarting") for record in self._replica_set.records
                    ):
                        raise ModelError("a replica has restarted during the update; the weights are the old ones")
                    self._weights, self._from_trainer, self._weights_kept = None, True, True
                    self._stale_replicas.clear()
                    self._set_first_messages()
                errors = self.execute(lambda _: ApplyStaged())
                self._set_version(version)
                for error in errors:
                    raise error

    def rename_weights(self, version: str) -> None:
        """Give the weights in use another version."""
        with self.operation, self._paused("keep"):
            self._set_version(version)

    def execute(self, task: TaskOf) -> list[TokError]:
        """Let all workers of all replicas execute a task, and return the replicas' errors."""
        self._dispatcher.require_ready()
        return self._command("transfer", task=task)

    def workers(self) -> tuple[int, int, int]:
        """Return the replicas that run, all replicas, and the workers of each."""
        info = self._replica_set.info
        assert info is not None  # set before the engine can be used
        return len(self._replica_set.running()), len(self._replica_set.records), info.tp * info.pp

    @property
    def closed(self) -> bool:
        """Return whether the engine has been closed."""
        return self._replica_set.closed

    @property
    def needs_all_tensors(self) -> bool:
        """Return whether a replica has lost its weights, by a restart after a trainer's update or by a sleep."""
        return bool(self._stale_replicas) or not self._weights_kept

    def _set_version(self, version: str | None) -> str:
        """Count an update, and return the version of its weights; None: the number of the update."""
        self.updates += 1
        version = str(self.updates) if version is None else version
        self._requests.change_weights(version)
        return version

    @contextmanager
    def _paused(self, mode: PauseMode) -> Iterator[None]:
        """Pause the engine within the context, unless it is paused already."""
        pausing = not self.paused
        try:
            if pausing or mode != "keep":
                self.pause(mode)
            yield
        finally:
            if pausing:  # also if an interrupt ends `pause`
                self.resume()

    def sleep(self, level: int, mode: PauseMode, tags: Sequence[str] | None) -> None:
        """Release memory in all replicas; see `Engine.sleep`."""
        if level not in (1, 2):
            raise InvalidField("level", level, "1, 2")
        _check_mode(mode)
        chosen = self._checked_tags(tags)
        with self._urgently("pause", mode):
            self._dispatcher.require_ready()
            with self._paused(mode):
                before, kept = self.asleep, self._weights_kept
                self._weights_kept &= level == 1 or "weights" not in chosen
                self._set_asleep(before.union(chosen))
                if errors := self._memory("sleep", chosen, keep=level == 1):
                    self._weights_kept = kept
                    self._set_asleep(before)
                    self._memory("wake_up", tuple(tag for tag in chosen if tag not in before))
                    raise errors[0]

    def wake_up(self, tags: Sequence[str] | None) -> None:
        """Restore memory in all replicas; see `Engine.wake_up`."""
        chosen = self._checked_tags(tags)
        with self.operation:
            self._dispatcher.require_ready()
            old = tuple(tag for tag in chosen if tag in self.asleep)
            if not old:
                return
            before, left = self.asleep, self.asleep.difference(old)
            reload = not (left or self._weights_kept)
            if reload and self._from_trainer:
                allowed = '["weights"], then an update: a trainer sent the weights, and they were dropped'
                raise InvalidField("tags", list(chosen), allowed)
            with self._paused("keep"):
                self._set_asleep(left)
                try:
                    self._wake(old, reload=reload)
                except BaseException:  # also an interrupt, which leaves it open what the replicas have done
                    self._set_asleep(before)
                    self._memory("sleep", old, keep=self._weights_kept)
                    raise

    def _wake(self, tags: tuple[MemoryTag, ...], *, reload: bool) -> None:
        """Restore memory in all replicas, and with `reload` the dropped weights. Raise the first error."""
        errors = self._memory("wake_up", tags)
        if not errors and reload:
            errors = self._command("check_weights", self._weights)
        if errors:
            raise errors[0]
        if reload:
            self._load(self._weights)

    def _checked_tags(self, tags: Sequence[str] | None) -> tuple[MemoryTag, ...]:
        """Return the tags without repetition; None: all. Raise InvalidField for unknown tags or without sleep mode."""
        if not self._sleep_mode:
            raise InvalidField("enable_sleep_mode", False, "true from the engine's start, for sleep and wake_up")
        if isinstance(tags, str) or not isinstance(tags, Sequence | None):
            raise InvalidField("tags", tags, f"a list of {', '.join(MEMORY_TAGS)}")
        for tag in tags or ():
            if tag not in MEMORY_TAGS:
                raise InvalidField("tags", tag, ", ".join(MEMORY_TAGS))
        return tuple(tag for tag in MEMORY_TAGS if tags is None or tag in tags)

    def _set_asleep(self, tags: frozenset[MemoryTag]) -> None:
        """Set the released tags. Call this before commanding the replicas, for replicas that become ready meanwhile."""
        with self._changed:
            self.asleep = tags
            self._set_first_messages()

    def _memory(
        self, action: Literal["sleep", "wake_up"], tags: tuple[MemoryTag, ...], *, keep: bool = True
    ) -> list[TokError]:
        return self._command(action, task=lambda _: MemoryTask(action, tags, keep))

    def _load(self, weights: str | None) -> None:
        """Load the weights in all replicas. If a replica fails, reload the old weights in the others.

        Old weights that a trainer sent cannot be reloaded: the other replicas then keep the new weights.
        """
        old, sent = self._weights, self._from_trainer
        with self._changed:
            self._weights, self._from_trainer = weights, False
            self._stale_replicas.clear()
            self._set_first_messages()
        errors = self._command("load_weights", weights)
        if not errors:
            self._weights_kept = True
            return
        if sent:
            self._set_version(None)
            raise errors[0]
        with self._changed:
            self._weights = old
            self._set_first_messages()
        self._command("load_weights", old)
        raise errors[0]

    def receive_answer(self, replica: int, result: CommandResult) -> None:
        """Record the answer of a replica to a command."""
        with self._changed:
            self._record_answer(replica, result.error, result.number)

    def replica_lost(self, replica: int, reason: str) -> None:
        """Record that a replica has died, as an error of the pending command."""
        with self._changed:
            self.deaths += 1
            if self._from_trainer:
                self._stale_replicas.add(replica)
            self._record_answer(replica, EngineDead(f"replica {replica} has ended: {reason}"))

    def _record_answer(self, replica: int, error: TokError | str, number: int | None = None) -> None:
        current = self._pending
        if current is None or replica not in current.waiting or number not in (None, current.number):
            return
        current.waiting.remove(replica)
        if error:
            current.errors.append(current.error_type(error) if isinstance(error, str) else error)
        self._changed.notify_all()

    @contextmanager
    def _urgently(self, kind: _Urgent, mode: PauseMode | None = None) -> Iterator[None]:
        """Hold `operation` within the context. Unless `mode` is "wait", end the wait of a pause that holds it."""
        with ExitStack() as waiting:
            if mode != "wait":
                self._urgent.append(kind)
                waiting.callback(self._urgent.remove, kind)
            with self.operation:
                waiting.close()
                yield

    def _await_running(self) -> None:
        """Hold new requests, and wait until all dispatched requests have ended, or an urgent operation waits."""
        self._dispatcher.holding = True
        try:
            while self._dispatcher.any_dispatched() and "pause" not in self._urgent:
                if self._replica_set.closed:
                    raise EngineClosed("the engine was closed")
                if "resume" in self._urgent:
                    raise EngineResumed("the engine was resumed before all requests had ended")
                time.sleep(DRAIN_POLL_SECONDS)  # polls: with many open requests a condition would wake all the time
        except BaseException:
            self._dispatcher.release()
            raise

    def _command(self, action: CommandAction, weights: str | None = None, task: TaskOf | None = None) -> list[TokError]:
        """Send a command to all replicas that run, and wait for their answers; return their errors."""
        with self._changed:
            replicas = self._replica_set.running()
            error_type = EngineError if action in ("sleep", "wake_up") else ModelError
            number = self._send(action, replicas, weights, task)
            current = self._pending = _PendingCommand(number, error_type, set(replicas))
            self._changed.wait_for(lambda: not current.waiting or self._replica_set.closed)
            self._pending = None
            if self._replica_set.closed:
                raise EngineClosed("the engine was closed")
            return current.errors

    def _send(
        self, action: CommandAction, replicas: list[int], weights: str | None = None, task: TaskOf | None = None
    ) -> int:
        """Send a command to the replicas, and return its number."""
        number = next(self._numbers)
        for replica in replicas:
            replica_task = None if task is None else task(replica)
            self._replica_set.send(replica, EngineCommand(number, action, weights, replica_task))
        return number

    def _set_first_messages(self) -> None:
        """Set the commands that bring a starting replica into the state of the others."""
        commands = [EngineCommand(next(self._numbers), "pause")] if self.paused or self._from_trainer else []
        if self._weights is not None:
            commands.append(EngineCommand(next(self._numbers), "load_weights", self._weights))
        if self.asleep:
            task = MemoryTask("sleep", tuple(self.asleep), self._weights_kept)
            commands.append(EngineCommand(next(self._numbers), "sleep", task=task))
        self._replica_set.first_messages = tuple(commands)


def _check_mode(mode: str) -> None:
    """Raise InvalidField unless `mode` is one of PauseMode."""
    if mode not in get_args(PauseMode):
        raise InvalidField("mode", mode, ", ".join(get_args(PauseMode)))

"""Simulate replicas for tests of the engine: a real manager over a simulated worker that runs and dies on command."""

from __future__ import annotations

from collections.abc import Sequence

from support.engines import assert_all_given_back
from support.schedules import make_manager
from tok_core import EngineConfig
from tok_core.engine.core import EngineCore
from tok_core.messages import EngineInfo, Progress, ToManager
from tok_core.replicas.replica import Death, Report


class SimulatedReplica:
    """A replica that becomes ready in `be_ready`, works in `turn`, and dies in `die`."""

    def __init__(self, info: EngineInfo, report: Report, death: Death) -> None:
        self.manager, self.ports = make_manager(info)
        self.ports.report = self._hear  # type: ignore[method-assign]
        self._info = info
        self._report = report
        self._death = death
        self.cached: list[int] = []  # cached tokens of each request part

    def start(self) -> None:
        """Do nothing until `be_ready`."""

    def send(self, messages: Sequence[ToManager]) -> None:
        """Send messages to the manager."""
        self.ports.inbox += messages

    def close(self) -> None:
        """Do nothing."""

    def be_ready(self) -> None:
        """Report that the worker has loaded its model."""
        self._report(self._info)

    def turn(self) -> bool:
        """Run one turn of the manager; return whether there was work."""
        if self.manager.turn():
            return True
        self.manager._report_if_changed()
        self.ports.wait(1.0)
        return bool(self.ports.queued)

    def die(self, reason: str, *, by_request: bool = False) -> None:
        """Report the replica's death and nothing else."""
        self._death(self, reason, by_request=by_request)

    def settle(self) -> None:
        """Run until idle, and check that the manager holds nothing."""
        while self.turn():
            pass
        assert_all_given_back(self.manager)

    def _hear(self, progress: Progress) -> None:
        self.cached += [tokens for _, tokens, _ in progress.started]
        self._report(progress)


def simulated_core(info: EngineInfo, **options: object) -> EngineCore:
    """Return an engine core whose simulated replicas have been started."""
    config = EngineConfig(model="simulated", page_size=info.page_size, **options)  # type: ignore[arg-type]

    def make_replica(config: EngineConfig, index: int, report: Report, death: Death) -> SimulatedReplica:
        return SimulatedReplica(info, report, death)

    core = EngineCore(config, in_process=True, make_replica=make_replica)
    core._replica_set.start(config, "simulated", core._events)
    return core


def replica_of(core: EngineCore, number: int) -> SimulatedReplica:
    """Return the simulated replica with this number."""
    replica = core._replica_set.records[number].replica
    assert isinstance(replica, SimulatedReplica)
    return replica

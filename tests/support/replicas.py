"""Replicas for tests of the engine: a real manager over a simulated worker, which runs and dies when it is told to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from support.engines import assert_all_given_back
from support.schedules import make_manager
from tok_core import EngineConfig
from tok_core.engine.core import EngineCore
from tok_core.messages import EngineInfo, Progress, ToManager
from tok_core.replicas.replica import Death, Report


class SimulatedReplica:
    """Begins to serve with `be_ready`, works in `turn`, and ends with `die`."""

    def __init__(self, info: EngineInfo, report: Report, death: Death) -> None:
        self.manager, self.ports = make_manager(info)
        self.ports.report = self._hear  # type: ignore[method-assign]
        self._info = info
        self._report = report
        self._death = death
        self.cached: list[int] = []  # tokens found in the cache, of each part

    def start(self) -> None:
        """Waits for `be_ready`."""

    def send(self, messages: Sequence[ToManager]) -> None:
        """To the manager."""
        self.ports.inbox += messages

    def close(self) -> None:
        """Nothing is left to be closed."""

    def be_ready(self) -> None:
        """The worker has loaded its model."""
        self._report(self._info)

    def turn(self) -> bool:
        """Lets the manager do something; returns whether there was anything to do."""
        if self.manager.turn():
            return True
        self.manager._report_if_changed()
        self.ports.wait(1.0)
        return bool(self.ports.queued)

    def die(self, reason: str, *, by_request: bool = False) -> None:
        """Ends without another word."""
        self._death(self, reason, by_request=by_request)

    def settle(self) -> None:
        """Works until there is nothing to do, and checks that the manager holds nothing."""
        while self.turn():
            pass
        assert_all_given_back(self.manager)

    def _hear(self, progress: Progress) -> None:
        self.cached += [tokens for _, tokens in progress.cached]
        self._report(progress)


def simulated_core(info: EngineInfo, **options: object) -> EngineCore:
    """An engine's core whose replicas are simulated, and start."""
    config = EngineConfig(model="simulated", page_size=info.page_size, **options)  # type: ignore[arg-type]
    core = EngineCore(config, in_process=True)

    def kind(config: EngineConfig, index: int, report: Report, death: Death) -> SimulatedReplica:
        return SimulatedReplica(info, report, death)

    make: Callable[..., object] = kind
    core._replica_set._kind = make  # type: ignore[assignment]
    core._replica_set.start(config, "simulated")
    return core


def replica_of(core: EngineCore, number: int) -> SimulatedReplica:
    """A simulated replica."""
    replica = core._replica_set.records[number].replica
    assert isinstance(replica, SimulatedReplica)
    return replica

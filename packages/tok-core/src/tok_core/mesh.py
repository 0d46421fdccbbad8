"""Coordinates of a replica's workers in its mesh, and the rendezvous of workers on several hosts. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec


class RankCoordinates(msgspec.Struct, frozen=True):
    """Pipeline stage and tensor-parallel rank of one worker among the `stages` × `ranks` of a replica.

    Workers are numbered stage by stage: `number = stage × ranks + rank`. Worker `number` of replica `i` takes device
    `i × stages × ranks + number`. The ranks of a stage communicate most and so get neighbouring devices.
    """

    stage: int = 0
    stages: int = 1
    rank: int = 0
    ranks: int = 1

    @property
    def number(self) -> int:
        """Return the index of the worker within its replica."""
        return self.stage * self.ranks + self.rank

    @property
    def workers(self) -> int:
        """Return the number of workers of the replica."""
        return self.stages * self.ranks

    @property
    def first(self) -> bool:
        """Return whether the worker belongs to the stage that embeds tokens."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Return whether the worker belongs to the stage that samples tokens."""
        return self.stage == self.stages - 1

    @property
    def returns(self) -> bool:
        """Return whether this is the one worker that sends a step's tokens to the manager."""
        return self.last and self.rank == 0


def all_coordinates(pp: int, tp: int) -> Iterator[RankCoordinates]:
    """Yield the coordinates of all workers of a replica, in order of `number`."""
    for stage in range(pp):
        for rank in range(tp):
            yield RankCoordinates(stage, pp, rank, tp)


class Rendezvous(msgspec.Struct, frozen=True):
    """Address at which workers on hosts without a common file system meet; worker 0 listens there.

    listener  file descriptor of worker 0's listening socket; None for the others
    """

    host: str
    port: int
    listener: int | None = None

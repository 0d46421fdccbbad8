"""The mesh of a replica's workers: coordinates of each, and where workers on several hosts meet. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec


class RankCoordinates(msgspec.Struct, frozen=True):
    """One worker among the `stages` × `ranks` of a replica.

    Workers are numbered stage by stage, tensor-parallel ranks side by side; replica `i` takes the devices from
    `i × stages × ranks` on, one a worker in that order: the ranks of a stage, which talk most, are neighbours.
    """

    stage: int = 0
    stages: int = 1
    rank: int = 0
    ranks: int = 1

    @property
    def number(self) -> int:
        """Among the replica's workers."""
        return self.stage * self.ranks + self.rank

    @property
    def workers(self) -> int:
        """Of the replica."""
        return self.stages * self.ranks

    @property
    def first(self) -> bool:
        """Whether it is of the stage that embeds tokens."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether it is of the stage that draws tokens."""
        return self.stage == self.stages - 1

    @property
    def returns(self) -> bool:
        """Whether it is the one worker that sends a step's tokens to the manager."""
        return self.last and self.rank == 0


def all_coordinates(pp: int, tp: int) -> Iterator[RankCoordinates]:
    """All workers of a replica, in order of their numbers."""
    for stage in range(pp):
        for rank in range(tp):
            yield RankCoordinates(stage, pp, rank, tp)


class Rendezvous(msgspec.Struct, frozen=True):
    """Address at which workers on hosts without a common file system meet: worker 0 listens there.

    listener  file descriptor of worker 0's listening socket; None for the others
    """

    host: str
    port: int
    listener: int | None = None

"""Memory through which the ranks of a stage tell each other small things from within kernels, without a barrier.

Every rank has a buffer that all can write to. A program of a kernel writes its words straight into the buffers of its
like on the other ranks, and waits for theirs to arrive in its own: a word of ones alone stands for nothing yet, and no
word sent is one. Who has read a word puts the ones back. (Lamport 1977, "Concurrent reading and writing", is where
readers first did without locks.)

Two sets of words take turns, by a count that every program keeps on the device, so that a captured graph may be
replayed. Two are enough: a rank writes for the turn t + 2 in a later kernel than that in which it got what the others
sent for t + 1, which they sent in a later kernel than that in which they read, and cleared, what came for t. So all
kernels of a lane must follow each other in time on every rank, alike, and each rank must send each other one in each.

Programs wait for others of the same number only, having sent what these wait for, and GPUs begin programs in order of
their numbers: among those begun on all ranks and not ended, the first waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SETS = 2
PATIENCE = 60.0  # seconds; ranks may be as far apart as one compiles a kernel that another has found compiled
_CLOCK = 2e9  # a second, about
_ALIGNED = 4  # words, of 4 bytes


@dataclass(frozen=True, slots=True)
class Lane:
    """What the programs of one kernel have: `programs` of them at most, `words` of each rank a program and turn.

    buffers   int32 `[SETS, ranks, programs, words]` of every rank, in order; this one's is its own memory
    turns     int32 `[programs]`, how often each program has run on this rank
    patience  clock ticks until a program that waits in vain ends its process's use of the device (a trap)
    """

    rank: int
    buffers: tuple[Tensor, ...]
    turns: Tensor
    patience: int

    @property
    def ranks(self) -> int:
        return len(self.buffers)

    @property
    def programs(self) -> int:
        return len(self.turns)

    @property
    def words(self) -> int:
        return self.buffers[0].shape[3]


# Programs and words a rank, program and turn.
SUM_UNITS = 128  # of 16 bytes
_SUMS = (1024, 4 * SUM_UNITS)
_DRAWS = (1024, 8)
SUM_BYTES = _SUMS[0] * _SUMS[1] * 4
"""The largest tensor that `Exchange.sums` can take."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One lane for each kernel that exchanges: of sums, and of draws."""

    sums: Lane
    draws: Lane

    @staticmethod
    def bytes(ranks: int) -> int:
        """The size of a rank's buffer."""
        return sum(4 * SETS * ranks * programs * words for programs, words in (_SUMS, _DRAWS))

    @classmethod
    def over(cls, buffers: Sequence[Tensor], rank: int, patience: float = PATIENCE) -> Exchange:
        """Of every rank's buffer, uint8 `[bytes(ranks)]`; `patience` in seconds.

        Clears this rank's own: nobody may exchange anything until all have returned, and their devices have ended it.
        """
        ranks, begin, lanes = len(buffers), 0, list[Lane]()
        buffers[rank].fill_(0xFF)
        for programs, words in (_SUMS, _DRAWS):
            end = begin + 4 * SETS * ranks * programs * words
            views = (buffer[begin:end].view(torch.int32).view(SETS, ranks, programs, words) for buffer in buffers)
            turns = torch.zeros(programs, dtype=torch.int32, device=buffers[rank].device)
            lanes.append(Lane(rank, tuple(views), turns, int(patience * _CLOCK)))
            begin = end
        return cls(*lanes)

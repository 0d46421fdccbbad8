"""Define the buffers through which kernels of the ranks of a pipeline stage exchange small values, without a barrier.

Every rank has a buffer that all ranks can write to. A program of a kernel writes its words into the buffers of the
other ranks. Then it waits until the words of the program with its number on those ranks arrive in its own buffer. The
word 0xFFFFFFFF means empty, and no word sent has this value. The reader resets a word to 0xFFFFFFFF after reading it.
(Lamport 1977, "Concurrent reading and writing", introduced reading without locks.)

Two sets of words take turns. Every program selects a set by a turn counter on the device, so that a captured graph can
be replayed. Two sets are enough. A rank writes for turn t + 2 in a later kernel than the one in which it received the
words of turn t + 1. The other ranks sent these words in a later kernel than the one in which they read and cleared the
words of turn t. This requires that all kernels of a channel run one after the other, in the same order on every rank,
and that each rank sends to each other rank in each of these kernels.

No deadlock occurs. A program waits only for programs of the same number, after it has sent the words that they wait
for. GPUs start programs in the order of their numbers. So the lowest-numbered program that has started on all ranks and
has not ended always receives its words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SETS = 2
PATIENCE = 60.0  # timeout in seconds: one rank may have to compile a kernel that another loads from Triton's cache
_CLOCK_HZ = 2e9  # approximate rate of a GPU's clock


@dataclass(frozen=True, slots=True)
class ExchangeChannel:
    """Buffers and counters of one kernel: at most `programs` programs, and `words` words per rank, program and turn.

    rank      number of this rank
    buffers   int32 [SETS, ranks, programs, words] of every rank, in rank order; this rank's buffer is local memory
    turns     int32 [programs], how often each program has run on this rank
    patience  clock ticks that a program waits for words before it traps, which ends the process's use of the device
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


SUM_UNITS = 128  # units of 16 bytes that a program sums, one per thread
# (programs, words per rank, program and turn) of each channel.
_SUMS = (1024, 4 * SUM_UNITS)
_SAMPLES = (1024, 8)
SUM_BYTES = _SUMS[0] * _SUMS[1] * 4
"""Size in bytes of the largest tensor that `Exchange.sums` can take."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One channel per kernel that exchanges values: `sums` for all-reduce, `samples` for sampling."""

    sums: ExchangeChannel
    samples: ExchangeChannel

    @staticmethod
    def bytes(ranks: int) -> int:
        """Return the size in bytes of a rank's buffer."""
        return sum(4 * SETS * ranks * programs * words for programs, words in (_SUMS, _SAMPLES))

    @classmethod
    def over(cls, buffers: Sequence[Tensor], rank: int, patience: float = PATIENCE) -> Exchange:
        """Create the channels from every rank's buffer, uint8 `[bytes(ranks)]`; `patience` is in seconds.

        The call clears this rank's own buffer. No rank may exchange anything until this call has returned on all ranks
        and their devices have finished clearing.
        """
        ranks, begin, channels = len(buffers), 0, list[ExchangeChannel]()
        buffers[rank].fill_(0xFF)
        for programs, words in (_SUMS, _SAMPLES):
            end = begin + 4 * SETS * ranks * programs * words
            views = (buffer[begin:end].view(torch.int32).view(SETS, ranks, programs, words) for buffer in buffers)
            turns = torch.zeros(programs, dtype=torch.int32, device=buffers[rank].device)
            channels.append(ExchangeChannel(rank, tuple(views), turns, int(patience * _CLOCK_HZ)))
            begin = end
        return cls(*channels)

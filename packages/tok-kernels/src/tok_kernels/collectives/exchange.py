"""Define the buffers through which kernels of tensor-parallel ranks exchange values, without a barrier.

Every rank has a buffer that all ranks can write to. Program i of a kernel writes words (uint32) into the buffers of the
other ranks. Then it waits until the words of program i of those ranks arrive in its own buffer. The word 0xFFFFFFFF
marks an empty place and is never sent. The reader resets each word to 0xFFFFFFFF. This is the scheme of Lamport-style
one-shot all-reduces (Lamport 1977, "Concurrent reading and writing").

Buffers are doubled: a program uses set `epoch % 2` and increments its epoch, a counter on the device, so that a CUDA
graph can be replayed. Two sets suffice:
  - A rank writes the words of epoch t + 2 in a later kernel than the one that received the words of epoch t + 1.
  - The other ranks sent those in a later kernel than the one that read and reset the words of epoch t.
This requires that all kernels of a channel run one after the other, in the same order on every rank, and that each rank
sends to each other rank in each of these kernels.

No deadlock occurs. A program sends its words before it waits, and waits only for programs of the same index. GPUs start
programs in the order of their indices. So the running program of the lowest index always receives its words.
Kernels that start early (PDL) keep no program out, since they start once all programs of the kernel run. Ranks on one
GPU could keep each other out, so each rank needs a GPU of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BUFFER_SETS = 2
# One rank may have to compile a kernel that another rank loads from Triton's cache.
DEFAULT_TIMEOUT_SECONDS = 60.0
_GPU_CLOCK_HZ = 2e9  # approximate


@dataclass(frozen=True, slots=True)
class ExchangeChannel:
    """Buffers and epochs of one kernel: at most `programs` programs, which send `words` words per rank and epoch.

    rank           number of this rank
    buffers        int32 [BUFFER_SETS, ranks, programs, words] of every rank, in rank order; this rank's buffer is local
                   memory
    epochs         int32 [programs], how often each program has run on this rank
    timeout_ticks  GPU clock ticks that a program waits for words; then it traps, and the process loses the device
    """

    rank: int
    buffers: tuple[Tensor, ...]
    epochs: Tensor
    timeout_ticks: int

    @property
    def ranks(self) -> int:
        return len(self.buffers)

    @property
    def programs(self) -> int:
        return len(self.epochs)

    @property
    def words(self) -> int:
        return self.buffers[0].shape[3]


UNITS_PER_PROGRAM = 128  # units of 16 bytes that a program of the all-reduce sums, one per thread
# (programs, words per rank, program and epoch) of each channel.
_ALL_REDUCE = (1024, 4 * UNITS_PER_PROGRAM)
_SAMPLING = (1024, 8)
MAX_ALL_REDUCE_BYTES = _ALL_REDUCE[0] * _ALL_REDUCE[1] * 4
"""Size in bytes of the largest tensor that `Exchange.all_reduce` can take."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """The channels of a rank, one for each kernel that exchanges values: the all-reduce and sampling."""

    all_reduce: ExchangeChannel
    sampling: ExchangeChannel

    @staticmethod
    def buffer_bytes(ranks: int) -> int:
        """Return the size in bytes of a rank's buffer."""
        return sum(4 * BUFFER_SETS * ranks * programs * words for programs, words in (_ALL_REDUCE, _SAMPLING))

    @classmethod
    def from_buffers(
        cls, buffers: Sequence[Tensor], rank: int, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    ) -> Exchange:
        """Create the channels of `rank` from the buffers of all ranks, uint8 `[buffer_bytes(ranks)]` each.

        The call clears this rank's own buffer. No rank may exchange anything until this call has returned on all ranks
        and their devices have finished clearing.
        """
        ranks, begin, channels = len(buffers), 0, list[ExchangeChannel]()
        buffers[rank].fill_(0xFF)
        for programs, words in (_ALL_REDUCE, _SAMPLING):
            end = begin + 4 * BUFFER_SETS * ranks * programs * words
            views = (
                buffer[begin:end].view(torch.int32).view(BUFFER_SETS, ranks, programs, words) for buffer in buffers
            )
            epochs = torch.zeros(programs, dtype=torch.int32, device=buffers[rank].device)
            channels.append(ExchangeChannel(rank, tuple(views), epochs, int(timeout_seconds * _GPU_CLOCK_HZ)))
            begin = end
        return cls(*channels)

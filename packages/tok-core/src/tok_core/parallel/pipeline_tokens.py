"""Send sampled tokens from the last pipeline stage to the others, which feed them to later steps."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tok_core.messages import Int32, StepInput


class PendingTokens(NamedTuple):
    """Draws of an earlier step: once `work` has been waited for, `token`, int32 `[R]`, is the last of each `slot`."""

    slot: Int32
    token: Tensor
    work: dist.Work


class TokenSender:
    """Sends each step's draws to all stages, through buffers used in turn: `rows` of a step at most.

    own  this worker's rank in the group
    """

    def __init__(self, group: dist.ProcessGroup, own: int, buffers: int, rows: int, device: torch.device) -> None:
        self._group = group
        self._own = own
        self._buffers = [torch.empty(rows, dtype=torch.int32, device=device) for _ in range(buffers)]
        self._sent: list[dist.Work | None] = [None] * buffers
        self._turn = 0

    def share(self, token_R: Tensor) -> None:
        """Tells what the rows of a step drew, int32; the tensor may be changed at once."""
        if not len(token_R):
            return
        self._turn = turn = (self._turn + 1) % len(self._buffers)
        earlier, buffer = self._sent[turn], self._buffers[turn][: len(token_R)]
        if earlier is not None:
            earlier.wait()
        buffer.copy_(token_R)
        self._sent[turn] = dist.broadcast(buffer, group=self._group, group_src=self._own, async_op=True)


class TokenReceiver:
    """Receives each step's draws, to be taken over when a later step says so (`StepInput.draws_upto`).

    A slot may be given away before the draws of its former owner are taken over: those then go to the slot that never
    holds a sequence, `rows`. At most `buffers` steps may wait.
    """

    def __init__(self, group: dist.ProcessGroup, source: int, buffers: int, rows: int, device: torch.device) -> None:
        self._group = group
        self._source = source
        self._nobody = np.int32(rows)
        self._buffers = [torch.empty(rows, dtype=torch.int32, device=device) for _ in range(buffers)]
        self._turn = 0
        self._renewed = np.zeros(rows, np.int64)  # the step that gave each slot to its present owner
        self._pending: deque[tuple[int, Int32, Tensor, dist.Work]] = deque()

    def late(self, step: StepInput) -> list[PendingTokens]:
        """Draws of the steps up to the step's `draws_upto`, in order; they hold until `expect` is called."""
        found = []
        while self._pending and self._pending[0][0] <= step.draws_upto:
            number, slots, token, work = self._pending.popleft()
            found.append(PendingTokens(np.where(self._renewed[slots] > number, self._nobody, slots), token, work))
        return found

    def expect(self, step: StepInput) -> None:
        """To be called for every step, after `late`, and once all else of the step is launched: no draws come before
        that, and a device does not look for them earlier."""
        if step.new is not None:
            self._renewed[step.new.slot] = step.step
        rows = len(step.sample_slot)
        if not rows:
            return
        assert len(self._pending) < len(self._buffers), "draws of too many steps wait to be taken over"
        self._turn = (self._turn + 1) % len(self._buffers)
        buffer = self._buffers[self._turn][:rows]
        work = dist.broadcast(buffer, group=self._group, group_src=self._source, async_op=True)
        assert work is not None
        self._pending.append((step.step, step.sample_slot, buffer, work))

    def forget(self) -> None:
        """Drops what has not been taken over, once it is there."""
        while self._pending:
            self._pending.popleft()[3].wait()
        self._renewed.fill(0)

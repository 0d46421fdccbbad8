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
    """Tokens that an earlier step sampled: `token`, int32 `[R]`, one for each `slot`; valid after `work.wait()`."""

    slot: Int32
    token: Tensor
    work: dist.Work


class TokenSender:
    """Broadcaster of each step's sampled tokens to all stages; alternates between buffers.

    rank  this worker's rank in the group
    rows  maximum number of tokens of a step
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, buffers: int, rows: int, device: torch.device) -> None:
        self._group = group
        self._rank = rank
        self._buffers = [torch.empty(rows, dtype=torch.int32, device=device) for _ in range(buffers)]
        self._sent: list[dist.Work | None] = [None] * buffers
        self._turn = 0

    def send_tokens(self, token_R: Tensor) -> None:
        """Broadcast a step's sampled tokens, int32; the caller may change the tensor at once."""
        if not len(token_R):
            return
        self._turn = turn = (self._turn + 1) % len(self._buffers)
        earlier, buffer = self._sent[turn], self._buffers[turn][: len(token_R)]
        if earlier is not None:
            earlier.wait()
        buffer.copy_(token_R)
        self._sent[turn] = dist.broadcast(buffer, group=self._group, group_src=self._rank, async_op=True)


class TokenReceiver:
    """Receiver of each step's sampled tokens, until a later step records them (`StepInput.sampled_upto`).

    A slot may get a new sequence before the tokens of its former one are recorded. Those tokens go to slot `rows`,
    which never holds a sequence. Tokens of at most `buffers` steps may be pending.
    """

    def __init__(self, group: dist.ProcessGroup, source: int, buffers: int, rows: int, device: torch.device) -> None:
        self._group = group
        self._source = source
        self._padding_slot = np.int32(rows)
        self._buffers = [torch.empty(rows, dtype=torch.int32, device=device) for _ in range(buffers)]
        self._turn = 0
        self._owned_since = np.zeros(rows, np.int64)  # the step in which each slot got its sequence
        self._pending: deque[tuple[int, Int32, Tensor, dist.Work]] = deque()

    def pending_tokens(self, step: StepInput) -> list[PendingTokens]:
        """Return the tokens of the steps up to `step.sampled_upto`, in order; valid until `expect` is called."""
        tokens = []
        while self._pending and self._pending[0][0] <= step.sampled_upto:
            number, slots, token, work = self._pending.popleft()
            slots = np.where(self._owned_since[slots] > number, self._padding_slot, slots)
            tokens.append(PendingTokens(slots, token, work))
        return tokens

    def expect(self, step: StepInput) -> None:
        """Post the receive of the step's sampled tokens. Call this for every step, after `pending_tokens`.

        Launch everything else of the step before: its tokens cannot arrive earlier, and the device should not wait for
        them earlier.
        """
        if step.new is not None:
            self._owned_since[step.new.slot] = step.step
        if step.moves is not None:
            self._owned_since[step.moves.slot] = step.step
        rows = len(step.sample_slot)
        if not rows:
            return
        assert len(self._pending) < len(self._buffers), "sampled tokens of too many steps wait to be recorded"
        self._turn = (self._turn + 1) % len(self._buffers)
        buffer = self._buffers[self._turn][:rows]
        work = dist.broadcast(buffer, group=self._group, group_src=self._source, async_op=True)
        assert work is not None
        self._pending.append((step.step, step.sample_slot, buffer, work))

    def reset(self) -> None:
        """Wait for pending tokens and drop them."""
        while self._pending:
            self._pending.popleft()[3].wait()
        self._owned_since.fill(0)

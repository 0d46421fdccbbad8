"""Pipeline: what one stage takes from the stage before it and hands on to the stage after it.

A step is one micro-batch. Each worker launches every step, in the same order, and does with it, in this order: takes
over the draws of the steps up to its `draws_upto`; receives the stream; sends the stream; draws, or expects the draws.
What (step n, stage s) waits for — the stream of (n, s − 1), the draws of an earlier step's last stage, a buffer that
(n − BUFFERS, s + 1) reads — comes before it in the order of steps and then stages, so that no wait is circular.

A transfer is launched where its operands are known and waited for where its result is used: on a CUDA device that is an
order among streams, and the host runs on; on a CPU the host itself waits.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from tok_core.config import MAX_STEPS_AHEAD
from tok_core.mesh import RankCoordinates
from tok_core.messages import StepInput
from tok_core.parallel.pipeline_tokens import PendingTokens, TokenReceiver, TokenSender
from tok_core.parallel.process_groups import ProcessGroups

BUFFERS = 2  # of a stream on its way: one is filled, or emptied, while the stage computes what was in the other


class PipelineReceiver:
    """The stream from the stage before, through buffers used in turn: `rows` of `size` at most.

    On a CUDA device a receive is launched on a stream of its own, behind nothing but the last use of its buffer: as the
    host launches steps ahead of the device, the stream comes in while the step before it is computed.
    """

    def __init__(
        self, group: dist.ProcessGroup, rows: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._group = group
        self._buffers = [torch.empty((rows, size), dtype=dtype, device=device) for _ in range(BUFFERS)]
        self._turn = 0
        self._side: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._emptied = [torch.cuda.Event() for _ in range(BUFFERS)]  # type: ignore[no-untyped-call]

    def receive(self, rows: int, into: Tensor | None = None) -> Tensor:
        """The next step's stream `[rows, N]`, the caller's to change; in the tensor given, if one is."""
        self._turn = (self._turn + 1) % BUFFERS
        buffer = self._buffers[self._turn][:rows]
        self._launch(buffer).wait()
        stream = buffer.clone() if into is None else into.copy_(buffer)
        if self._side is not None:
            self._emptied[self._turn].record()
        return stream

    def _launch(self, buffer: Tensor) -> dist.Work:
        if self._side is not None:
            self._side.wait_event(self._emptied[self._turn])
        with nullcontext() if self._side is None else torch.cuda.stream(self._side):
            work = dist.irecv(buffer, group=self._group, group_src=0)
        assert work is not None
        return work


class PipelineSender:
    """The stream to the stage after, through buffers used in turn: `rows` of `size` at most."""

    def __init__(
        self, group: dist.ProcessGroup, rows: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._group = group
        self._buffers = [torch.empty((rows, size), dtype=dtype, device=device) for _ in range(BUFFERS)]
        self._sent: list[dist.Work | None] = [None] * BUFFERS
        self._turn = 0

    def send(self, stream: Tensor) -> None:
        """Hands the stream `[rows, N]` on; the tensor may be changed at once."""
        self._turn = turn = (self._turn + 1) % BUFFERS
        earlier, buffer = self._sent[turn], self._buffers[turn][: len(stream)]
        if earlier is not None:
            earlier.wait()
        buffer.copy_(stream)
        self._sent[turn] = dist.isend(buffer, group=self._group, group_dst=1)


class Pipeline:
    """One worker's ends of its pipeline; without stages beside its own there is nothing to hand on.

    rows, size  of the stream, `[rows, N]` at most
    slots       rows of a step that draw, at most
    """

    def __init__(self, peers: ProcessGroups, rows: int, size: int, dtype: torch.dtype, slots: int) -> None:
        self.peers = peers
        self.place = place = peers.place
        self._inlet = None if peers.before is None else PipelineReceiver(peers.before, rows, size, dtype, peers.device)
        self._outlet = None if peers.after is None else PipelineSender(peers.after, rows, size, dtype, peers.device)
        self._draws_out: TokenSender | None = None
        self._draws_in: TokenReceiver | None = None
        if peers.draws is not None and place.last:
            self._draws_out = TokenSender(peers.draws, place.stage, MAX_STEPS_AHEAD, slots, peers.device)
        elif peers.draws is not None:
            self._draws_in = TokenReceiver(peers.draws, place.stages - 1, MAX_STEPS_AHEAD, slots, peers.device)

    @classmethod
    def alone(cls, device: torch.device) -> Pipeline:
        """Of a worker that has the whole model."""
        return cls(ProcessGroups(RankCoordinates(), device), 0, 0, torch.float32, 0)

    def late(self, step: StepInput) -> list[PendingTokens]:
        """The draws of earlier steps that are to be taken over before the step; none at the last stage."""
        return [] if self._draws_in is None else self._draws_in.late(step)

    def receive(self, rows: int, into: Tensor | None = None) -> Tensor:
        """The stream of the stage before; not at the first stage."""
        assert self._inlet is not None
        return self._inlet.receive(rows, into)

    def send(self, stream: Tensor) -> None:
        """Hands the stream on to the stage after; not at the last stage."""
        assert self._outlet is not None
        self._outlet.send(stream)

    def share(self, token_R: Tensor) -> None:
        """Tells the stages before what a step drew, int32 `[R]`; at the last stage."""
        if self._draws_out is not None:
            self._draws_out.share(token_R)

    def expect(self, step: StepInput) -> None:
        """Will take over what the step draws, when a later step says so; not at the last stage."""
        assert self._draws_in is not None
        self._draws_in.expect(step)

    def forget(self) -> None:
        """Drops draws that have not been taken over, once they are there."""
        if self._draws_in is not None:
            self._draws_in.forget()

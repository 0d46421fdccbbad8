"""Transfer the residual stream and sampled tokens between the pipeline stages of a replica.

A step is one microbatch. All workers launch all steps in the same order. For each step a worker

1. records the sampled tokens of the steps up to its `sampled_upto`,
2. receives the residual stream from the stage before,
3. sends the residual stream to the stage after,
4. samples (last stage), or posts the receive of the sampled tokens (other stages).

(step n, stage s) waits for the residual stream of (n, s − 1), for sampled tokens of an earlier step's last stage, and
for a buffer that (n − BUFFERS, s + 1) reads. All of these precede (n, s) in the order of steps, then stages, so that
no wait is circular.

A transfer is launched as soon as its operands are known; the consumer of its result waits for it. On a CUDA device
that wait orders CUDA streams and the host runs on; on a CPU the host itself waits.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from tok_core.config import MAX_STEPS_AHEAD, RankCoordinates
from tok_core.messages import StepInput
from tok_core.parallel.pipeline_tokens import PendingTokens, TokenReceiver, TokenSender
from tok_core.parallel.process_groups import ProcessGroups

BUFFERS = 2  # per direction: one is filled or emptied while the stage computes on the contents of the other


class PipelineReceiver:
    """Receiver of the residual stream, at most `[rows, size]`, from the stage before; alternates between buffers.

    On a CUDA device a receive runs on a CUDA stream of its own and waits only for the last use of its buffer. The host
    launches steps ahead of the device, so that data arrives while the device computes the step before.
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

    def receive(self, rows: int, into: Tensor | None) -> Tensor:
        """Return the next step's residual stream `[rows, N]`, in tensor `into` if given; the caller may change it."""
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
    """Sender of the residual stream, at most `[rows, size]`, to the stage after; alternates between buffers."""

    def __init__(
        self, group: dist.ProcessGroup, rows: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._group = group
        self._buffers = [torch.empty((rows, size), dtype=dtype, device=device) for _ in range(BUFFERS)]
        self._sent: list[dist.Work | None] = [None] * BUFFERS
        self._turn = 0

    def send(self, stream: Tensor) -> None:
        """Send the residual stream `[rows, N]`; the caller may change the tensor at once."""
        self._turn = turn = (self._turn + 1) % BUFFERS
        earlier, buffer = self._sent[turn], self._buffers[turn][: len(stream)]
        if earlier is not None:
            earlier.wait()
        buffer.copy_(stream)
        self._sent[turn] = dist.isend(buffer, group=self._group, group_dst=1)


class Pipeline:
    """One worker's connections to the other pipeline stages; with a single stage there are none.

    rows, size  maximum shape of the residual stream
    slots       maximum number of rows of a step that sample
    """

    def __init__(self, peers: ProcessGroups, rows: int, size: int, dtype: torch.dtype, slots: int) -> None:
        self.peers = peers
        self.coordinates = coordinates = peers.coordinates
        self._receiver = (
            None if peers.before is None else PipelineReceiver(peers.before, rows, size, dtype, peers.device)
        )
        self._sender = None if peers.after is None else PipelineSender(peers.after, rows, size, dtype, peers.device)
        self._token_sender: TokenSender | None = None
        self._token_receiver: TokenReceiver | None = None
        if peers.token_group is not None and coordinates.last:
            self._token_sender = TokenSender(peers.token_group, coordinates.stage, MAX_STEPS_AHEAD, slots, peers.device)
        elif peers.token_group is not None:
            self._token_receiver = TokenReceiver(
                peers.token_group, coordinates.stages - 1, MAX_STEPS_AHEAD, slots, peers.device
            )

    @classmethod
    def alone(cls, device: torch.device) -> Pipeline:
        """Return the pipeline of a worker that holds all layers."""
        return cls(ProcessGroups(RankCoordinates(), device), 0, 0, torch.float32, 0)

    def pending_tokens(self, step: StepInput) -> list[PendingTokens]:
        """Return the tokens sampled by earlier steps that must be recorded before `step`; empty at the last stage."""
        return [] if self._token_receiver is None else self._token_receiver.pending_tokens(step)

    def receive(self, rows: int, into: Tensor | None = None) -> Tensor:
        """Return the residual stream of the stage before, as `PipelineReceiver` does; not at the first stage."""
        assert self._receiver is not None
        return self._receiver.receive(rows, into)

    def send(self, stream: Tensor) -> None:
        """Send the residual stream to the stage after; not at the last stage."""
        assert self._sender is not None
        self._sender.send(stream)

    def send_tokens(self, token_R: Tensor) -> None:
        """Broadcast a step's sampled tokens, int32 `[R]`, from the last stage to the others."""
        if self._token_sender is not None:
            self._token_sender.send_tokens(token_R)

    def expect(self, step: StepInput) -> None:
        """Post the receive of the step's sampled tokens, which `pending_tokens` returns; not at the last stage."""
        assert self._token_receiver is not None
        self._token_receiver.expect(step)

    def reset(self) -> None:
        """Wait for sampled tokens that are still pending, and drop them."""
        if self._token_receiver is not None:
            self._token_receiver.reset()

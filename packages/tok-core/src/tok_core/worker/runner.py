"""Runner: one step, from its StepInput to its StepOutput, without waiting for the device in between."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tok_core.messages import StepInput, StepOutput
from tok_core.model.decoder import CausalLM
from tok_core.worker.draw import draw
from tok_core.worker.state import WorkerState
from tok_kernels import AttentionBatch, Backend, CascadeLevel, Sampled


@dataclass(slots=True)
class Launched:
    """A step on its way: `output` waits until its tokens are on the host."""

    step: int
    began: float
    done: torch.cuda.Event | None
    token: Tensor
    logprob: Tensor
    top_token: Tensor
    top_logprob: Tensor

    def output(self) -> StepOutput:
        """The step's tokens; blocks until the device has computed them."""
        if self.done is not None:
            self.done.synchronize()
        return StepOutput(
            step=self.step,
            token=self.token.numpy(),
            logprob=self.logprob.numpy(),
            top_token=self.top_token.numpy(),
            top_logprob=self.top_logprob.numpy(),
            seconds=time.perf_counter() - self.began,
        )


@dataclass(slots=True)
class Rows:
    """What a step computes, on the device. Legend: B sequences, T tokens, R rows that sample."""

    slot_B: Tensor
    kv_len_B: Tensor
    token_T: Tensor
    position_T: Tensor
    kv_index_T: Tensor
    logit_row_R: Tensor
    batch: AttentionBatch


class Runner:
    """Launches steps in order. Each finds the tokens of the one before in `state.last_token`."""

    def __init__(self, model: CausalLM, backend: Backend, state: WorkerState) -> None:
        self.model = model
        self.backend = backend
        self.state = state

    @torch.inference_mode()
    def launch(self, step: StepInput) -> Launched:
        """Enqueues the whole step on the device."""
        began = time.perf_counter()
        state = self.state
        state.apply(step)
        rows = self._rows(step)
        state.token_of[rows.kv_index_T] = rows.token_T
        state.length[rows.slot_B] = rows.kv_len_B
        logits = self.model(rows.token_T, rows.position_T, rows.kv_index_T, state.caches, rows.batch, rows.logit_row_R)
        state.copy_pages(step)
        slot_R = state.put(step.sample_slot, torch.int64)
        sampled = draw(self.backend, state, step, logits, slot_R)
        state.last_token[slot_R] = sampled.token
        return self._to_host(step.step, began, sampled)

    def _rows(self, step: StepInput) -> Rows:
        state, device = self.state, self.state.device
        decode = state.put(step.decode_slot, torch.int64)
        count = np.concatenate((np.ones(len(step.decode_slot), np.int64), step.prefill_count))
        q_start = np.concatenate(([0], np.cumsum(count)))
        slot_B = torch.cat((decode, state.put(step.prefill_slot, torch.int64)))
        chunk_end = state.put(step.prefill_start + step.prefill_count, torch.int64)
        kv_len_B = torch.cat((state.length[decode] + 1, chunk_end))
        token_T = torch.cat((state.last_token[decode], state.put(step.prefill_token, torch.int64)))
        position_T = torch.cat((state.length[decode], state.put(_chunk_positions(step), torch.int64)))
        slot_T = torch.cat((decode, state.put(np.repeat(step.prefill_slot, step.prefill_count), torch.int64)))
        page_T = state.page_table[slot_T, position_T // state.page_size].long()
        levels, kv_start = self._levels(step, len(count))
        batch = AttentionBatch(
            page_table=state.page_table,
            slots=slot_B.int(),
            q_start=state.put(q_start, torch.int32),
            kv_len=kv_len_B.int(),
            kv_start=kv_start,
            num_decode=len(step.decode_slot),
            max_q=int(count.max()),
            max_kv=step.max_kv,
            levels=levels,
        )
        return Rows(
            slot_B=slot_B,
            kv_len_B=kv_len_B,
            token_T=token_T,
            position_T=position_T,
            kv_index_T=page_T * state.page_size + position_T % state.page_size,
            logit_row_R=state.put(q_start[1:][step.sample_row] - 1, torch.int64).to(device),
            batch=batch,
        )

    def _levels(self, step: StepInput, sequences: int) -> tuple[tuple[CascadeLevel, ...], Tensor]:
        """The step's prefix groups, and where each sequence's own part of the cache begins."""
        state = self.state
        kv_start = np.zeros(sequences, np.int32)
        if not len(step.group_start):
            return (), state.put(kv_start, torch.int32)
        member = np.arange(step.group_count.sum()) - np.repeat(
            np.cumsum(step.group_count) - step.group_count, step.group_count
        )
        kv_start[np.repeat(step.group_start, step.group_count) + member] = np.repeat(
            step.group_kv_end, step.group_count
        )
        level = CascadeLevel(
            row_start=state.put(step.group_start, torch.int32),
            row_count=state.put(step.group_count, torch.int32),
            slot=state.put(step.group_slot, torch.int32),
            kv_start=state.put(np.zeros_like(step.group_kv_end), torch.int32),
            kv_end=state.put(step.group_kv_end, torch.int32),
            max_rows=int(step.group_count.max()),
            max_kv=int(step.group_kv_end.max()),
        )
        return (level,), state.put(kv_start, torch.int32)

    def _to_host(self, step: int, began: float, sampled: Sampled) -> Launched:
        columns = (sampled.token.int(), sampled.logprob, sampled.top_token.int(), sampled.top_logprob)
        if self.state.device.type != "cuda":
            return Launched(step, began, None, *columns)
        host = [torch.empty(c.shape, dtype=c.dtype, pin_memory=True) for c in columns]
        for target, source in zip(host, columns, strict=True):
            target.copy_(source, non_blocking=True)
        done = torch.cuda.current_stream().record_event()
        return Launched(step, began, done, *host)


def _chunk_positions(step: StepInput) -> np.ndarray:
    """Positions of the prefill tokens: each chunk counts up from its start."""
    count = step.prefill_count.astype(np.int64)
    first = np.repeat(step.prefill_start - (np.cumsum(count) - count), count)
    return first + np.arange(count.sum())

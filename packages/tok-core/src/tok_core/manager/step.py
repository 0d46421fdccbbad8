"""StepBuilder: gathers what one step computes and writes it down as a StepInput."""

from __future__ import annotations

from itertools import chain

import numpy as np

from tok_core.manager.grouping import Groups
from tok_core.manager.sequences import SequenceTable
from tok_core.messages import EMPTY, Int32, NewSlots, StepInput, array
from tok_core.sampling import SamplingParams


class StepBuilder:
    """Collects prefill chunks, forks and new slots while a step is being scheduled."""

    def __init__(self, table: SequenceTable, eos_ids: tuple[int, ...]) -> None:
        self.table = table
        self.eos_ids = eos_ids
        self.fresh: list[int] = []  # slots that the worker has not seen with their present owner
        self.chunks: list[tuple[int, int, int]] = []  # slot, start, count
        self.draws: list[tuple[int, int]] = []  # chunk, slot
        self.copies: list[tuple[Int32, Int32]] = []

    def chunk(self, slot: int, start: int, count: int) -> None:
        """`slot` prefills `count` tokens from `start` on."""
        self._announce(slot)
        self.chunks.append((slot, start, count))

    def draw(self, slot: int) -> None:
        """`slot` draws its next token from the logits that end the last chunk."""
        self._announce(slot)
        self.draws.append((len(self.chunks) - 1, slot))

    def _announce(self, slot: int) -> None:
        if not self.table.announced[slot]:
            self.table.announced[slot] = True
            self.fresh.append(slot)

    def build(self, step: int, decode: np.ndarray, groups: Groups, changes: tuple[Int32, Int32, Int32]) -> StepInput:
        """The StepInput, with the table's lengths as they will be after the step."""
        table, rows = self.table, len(decode)
        drawn = array([slot for _, slot in self.draws])
        sample_slot = np.concatenate((decode.astype(np.int32), drawn))
        sample_row = np.concatenate((np.arange(rows, dtype=np.int32), array([rows + chunk for chunk, _ in self.draws])))
        chunk_slot, start, count = array(self.chunks).reshape(-1, 3).T
        tokens = [table.tokens[slot, first : first + size] for slot, first, size in self.chunks]
        computed = np.concatenate((decode, chunk_slot))
        return StepInput(
            step=step,
            new=self._new_slots() if self.fresh else None,
            page_slot=changes[0],
            page_index=changes[1],
            page_id=changes[2],
            decode_slot=decode.astype(np.int32),
            group_start=groups.row_start,
            group_count=groups.row_count,
            group_slot=groups.slot,
            group_kv_end=groups.kv_end,
            prefill_slot=chunk_slot,
            prefill_start=start,
            prefill_count=count,
            prefill_token=np.concatenate(tokens) if tokens else EMPTY,
            copy_src=np.concatenate([src for src, _ in self.copies]) if self.copies else EMPTY,
            copy_dst=np.concatenate([dst for _, dst in self.copies]) if self.copies else EMPTY,
            sample_row=sample_row,
            sample_slot=sample_slot,
            filter_row=_rows(table.filters[sample_slot]),
            penalty_row=_rows(table.penalises[sample_slot]),
            bias_row=_rows(table.length[sample_slot] < table.bias_until[sample_slot]),
            top_logprobs=int(table.top_logprobs[sample_slot].max(initial=0)),
            all_greedy=bool(table.greedy[sample_slot].all()),
            max_kv=int(table.length[computed].max(initial=0)),
        )

    def _new_slots(self) -> NewSlots:
        table, slots = self.table, self.fresh
        params = [_params(table, slot) for slot in slots]
        biases = [self._biases(slot, one) for slot, one in zip(slots, params, strict=True)]
        columns = list(zip(*chain.from_iterable(biases), strict=True)) or [(), (), (), ()]
        started = {slot: start for slot, start, _ in self.chunks}
        return NewSlots(
            slot=array(slots),
            length=array([started.get(slot, int(table.length[slot])) for slot in slots]),
            prompt_len=table.prompt_len[slots],
            seed=array([one.seed for one in params], np.int64),
            sample=table.sample[slots],
            temperature=array([one.temperature for one in params], np.float32),
            top_k=array([max(0, min(one.top_k, 2**31 - 1)) for one in params]),
            top_p=array([one.top_p for one in params], np.float32),
            min_p=array([one.min_p for one in params], np.float32),
            presence=array([one.presence_penalty for one in params], np.float32),
            frequency=array([one.frequency_penalty for one in params], np.float32),
            repetition=array([one.repetition_penalty for one in params], np.float32),
            bias_slot=array(columns[0]),
            bias_token=array(columns[1]),
            bias_value=array(columns[2], np.float32),
            bias_until=array(columns[3]),
        )

    def _biases(self, slot: int, params: SamplingParams) -> list[tuple[int, int, float, int]]:
        """Entries of the bias table: logit_bias for ever, and what would end the sample until min_tokens."""
        entries = [(slot, token, value, 2**31 - 1) for token, value in (params.logit_bias or {}).items()]
        if params.min_tokens:
            until = int(self.table.min_total[slot])
            ends = {*params.stop_token_ids, *(() if params.ignore_eos else self.eos_ids)}
            entries += [(slot, token, float("-inf"), until) for token in sorted(ends)]
        return entries


def _params(table: SequenceTable, slot: int) -> SamplingParams:
    request = table.requests[slot]
    assert request is not None
    return request.params


def _rows(mask: np.ndarray) -> Int32:
    return np.flatnonzero(mask).astype(np.int32)

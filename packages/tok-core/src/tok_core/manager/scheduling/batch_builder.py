"""Collect what one step computes and write it as a StepInput."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from tok_core.manager.faults import Faults
from tok_core.manager.grammar_manager import GrammarManager
from tok_core.manager.prefix_groups import Groups
from tok_core.manager.prompt_outputs import requested_prompt_outputs
from tok_core.manager.requests import Request
from tok_core.manager.sequences import NEVER, SequenceTable
from tok_core.manager.speculation import NO_ROWS
from tok_core.messages import (
    EMPTY,
    Int32,
    Int64,
    NewSlots,
    SharedPages,
    SlotMoves,
    StepInput,
    array,
)
from tok_core.sampling_params import DEVICE_COLUMNS, DeviceColumn, SamplingParams


class Changes(NamedTuple):
    """Page table entries that a step sets, `shared` ones first, and page copies made at its start; all int32 [n]."""

    shared: list[SharedPages]
    page_slot: Int32
    page_index: Int32
    page_id: Int32
    copy_src: Int32
    copy_dst: Int32


class BatchBuilder:
    """Contents of the step with number `step`, which is being scheduled."""

    def __init__(
        self, table: SequenceTable, eos_ids: tuple[int, ...], grammars: GrammarManager, faults: Faults, step: int
    ) -> None:
        self.step = step
        self.table = table
        self.grammars = grammars
        self.faults = faults
        self.eos_ids = eos_ids
        self.moves: list[tuple[Int64, Int64]] = []  # slots and their sources
        self.announced: list[int] = []  # slots whose present owner this step makes known to the worker
        self.announced_length: list[int] = []  # positions that each of these has in the cache before the step
        self.chunks: list[tuple[int, int, int]] = []  # slot, start, count
        self.sampling_slots: list[int] = []  # slots that sample from a chunk's logits
        self.sampling_chunks: list[int] = []  # index of the chunk for each of these
        self.starts: list[Int64] = []  # slots that begin with a decode row
        self.asking: list[int] = []  # indices of the chunks whose requests ask for prompt outputs
        self.lent = NO_ROWS
        self.predicted_tokens = 0  # tokens to predict for each guided sequence
        self._faulty: set[int] = set()  # requests that cannot be written

    @property
    def tokens(self) -> int:
        """Return the number of tokens that prefill chunks and new sequences compute in the step."""
        return sum(count for _, _, count in self.chunks) + sum(map(len, self.starts))

    @property
    def busy(self) -> Int64:
        """Return the slots of the prefill chunks and new sequences."""
        return np.concatenate((np.array([slot for slot, _, _ in self.chunks], np.int64), *self.starts))

    def chunk(self, slot: int, start: int, count: int) -> None:
        """Add a prefill chunk: `count` tokens of `slot` from position `start` on."""
        if not self.table.announced[slot] or self.table.moved[slot]:
            self.announce([slot], [start])
        request = self.table.requests[slot]
        assert request is not None
        if request.wants_prompt_outputs and request.leader == slot:
            self.asking.append(len(self.chunks))
        self.chunks.append((slot, start, count))

    def add_sampling(self, slot: int, forks: Int64) -> None:
        """Let `slot` and its new `forks` sample their next tokens from the logits at the end of the last chunk."""
        if len(forks):
            self.announce(forks.tolist(), [int(self.table.length[slot])] * len(forks))
        self.sampling_slots += [slot, *forks.tolist()]
        self.sampling_chunks += [len(self.chunks) - 1] * (1 + len(forks))

    def start(self, slots: Int64) -> None:
        """Add new `slots` of one request, which begin with a decode row."""
        self.announce(slots.tolist(), self.table.length[slots].tolist())
        self.starts.append(slots)

    def announce(self, slots: Sequence[int], length: Sequence[int]) -> None:
        """Let the worker set these slots to their owner's parameters, positions in the cache, and last known token."""
        self.table.announced[slots] = True
        self.table.moved[slots] = False
        self.announced += slots
        self.announced_length += length

    def move(self, slots: Int64, sources: Int64) -> None:
        """Let the worker set these slots to the table's position, for the sequences of `sources`, which it knows."""
        if len(slots):
            self.table.moved[slots] = False
            self.moves.append((slots, sources))

    def build(self, sampled_upto: int, decode: Int64, groups: Groups, changes: Changes) -> StepInput:
        """Return the StepInput; the table's lengths must already be those after the step.

        A request that cannot be written is at fault. Its rows stay in the step, with parameters that cannot fail, since
        the request ends before their tokens are back. An exception that no single request raises is passed on.
        """
        try:
            return self._written(sampled_upto, decode, groups, changes)
        except Exception:
            if not self._set_faulty_aside(decode):
                raise
        return self._written(sampled_upto, decode, groups, changes)

    def _set_faulty_aside(self, decode: Int64) -> bool:
        """Write each request alone to find those that raise, and reset their parameters; return whether any does."""
        table = self.table
        sampling = np.concatenate((decode, np.array(self.sampling_slots, np.int64)))
        slots = np.concatenate((sampling, self.busy, np.array(self.announced, np.int64)))
        for rid in np.unique(table.rid[slots]).tolist():
            try:
                self._write_alone(rid, sampling)
            except Exception as error:
                self.faults.add(rid, error)
                self._faulty.add(rid)
        own = slots[np.isin(table.rid[slots], list(self._faulty))]
        table.guided[own] = table.filters[own] = table.penalises[own] = False
        table.allowed_set[own] = -1
        table.bias_until[own] = table.top_logprobs[own] = 0
        self.asking = [index for index in self.asking if table.rid[self.chunks[index][0]] not in self._faulty]
        return bool(self._faulty)

    def _write_alone(self, rid: int, sampling: Int64) -> None:
        """Write the step's part of one request, to see whether it raises; `sampling`: slots that sample in the step."""
        table = self.table
        own = sampling[table.rid[sampling] == rid]
        self.grammars.masks(own[table.guided[own] | (table.allowed_set[own] >= 0)].astype(np.int32))
        announced = [(slot, length) for slot, length in zip(self.announced, self.announced_length, strict=True)]
        announced = [one for one in announced if table.rid[one[0]] == rid]
        if announced:
            slots, lengths = zip(*announced, strict=True)
            self._new_slots(list(slots), list(lengths))
        requested_prompt_outputs(
            table, self.chunks, [index for index in self.asking if table.rid[self.chunks[index][0]] == rid]
        )

    def _written(self, sampled_upto: int, decode: Int64, groups: Groups, changes: Changes) -> StepInput:
        table, rows, decode_slot = self.table, len(decode), decode.astype(np.int32)
        sample_slot, sample_row = decode_slot, np.arange(rows, dtype=np.int32)
        chunk_slot, start, count = array(self.chunks).reshape(-1, 3).T
        computed = decode
        if self.chunks:
            sample_slot = np.concatenate((decode_slot, array(self.sampling_slots)))
            sample_row = np.concatenate((sample_row, array(self.sampling_chunks) + np.int32(rows)))
            computed = np.concatenate((decode, chunk_slot))
        slots = sample_slot.astype(np.int64)  # NumPy indexes by int64 in half the time
        top_logprobs = table.top_logprobs[slots]
        masked = _rows(table.guided[slots] | (table.allowed_set[slots] >= 0))
        masks = self.grammars.masks(sample_slot[masked])
        tokens = [table.tokens[slot, first : first + size] for slot, first, size in self.chunks]
        return StepInput(
            step=self.step,
            sampled_upto=sampled_upto,
            new=self._new_slots(self.announced, self.announced_length) if self.announced else None,
            page_slot=changes.page_slot,
            page_index=changes.page_index,
            page_id=changes.page_id,
            decode_slot=decode_slot,
            levels=groups.levels,
            prefill_slot=chunk_slot,
            prefill_start=start,
            prefill_count=count,
            prefill_token=np.concatenate(tokens) if tokens else EMPTY,
            copy_src=changes.copy_src,
            copy_dst=changes.copy_dst,
            sample_row=sample_row,
            sample_slot=sample_slot,
            filter_row=_rows(table.filters[slots]),
            penalty_row=_rows(table.penalises[slots]),
            bias_row=_rows(table.length[slots] < table.bias_until[slots]),
            top_logprobs=int(top_logprobs.max(initial=0)),
            all_greedy=bool(table.greedy[slots].all()),
            max_kv=int((table.length[computed] + table.ahead[computed]).max(initial=0)),
            prompts=requested_prompt_outputs(table, self.chunks, self.asking) if self.asking else None,
            shared=changes.shared,
            mask_row=masked,
            mask_index=masks.mask_index,
            bitmask=masks.bitmask,
            top_row=_rows(top_logprobs > 0),
            drafts=self.lent.model_drafts,
            moves=self._slot_moves() if self.moves else None,
            verify_rows=self.lent.verify_rows,
            predict_slot=self._predicted_slots(sample_slot),
            predicted_tokens=self.predicted_tokens,
        )

    def _predicted_slots(self, sample_slot: Int32) -> Int32:
        """Return the slots of the guided sequences that sample, whose next tokens the worker predicts."""
        if not self.predicted_tokens:
            return EMPTY
        slots = sample_slot[self.table.guided[sample_slot]]
        if len(slots) and self.lent.verify_rows is not None:
            slots = slots[np.isin(slots, self.lent.slots, invert=True)]
        return slots

    def _slot_moves(self) -> SlotMoves:
        """Return the moves; the decode rows of their slots have advanced `length` by one already."""
        slots, sources = (np.concatenate(part) for part in zip(*self.moves, strict=True))
        length = self.table.length[slots] - 1
        token = self.table.tokens[slots, length]
        return SlotMoves(slots.astype(np.int32), sources.astype(np.int32), length, token)

    def _new_slots(self, announced: list[int], length: list[int]) -> NewSlots:
        """Return the parameters of new slots, read once per request, however many of its samples are new."""
        table, slots = self.table, array(announced)
        rids, first, owner = np.unique(table.rid[slots], return_index=True, return_inverse=True)
        params = [
            PLAIN if rid in self._faulty else self._params(announced[i]) for rid, i in zip(rids, first, strict=True)
        ]
        return NewSlots(
            slot=slots,
            length=array(length),
            last_token=table.tokens[slots, table.known[slots] - 1],
            eos_from_position=table.eos_from_position[slots],
            prompt_len=table.prompt_len[slots],
            salt=(table.family[slots] >> np.uint64(32)).astype(np.int32),
            sample=table.sample[slots],
            sampling={name: _column(params, name, column)[owner] for name, column in DEVICE_COLUMNS.items()},
            **self._bias_columns(slots),
        )

    def _bias_columns(self, announced: Int32) -> dict[str, np.ndarray]:
        slots = announced[self.table.bias_until[announced] > self.table.prompt_len[announced]].tolist()
        entries = [self._biases(slot, self._params(slot)) for slot in slots]
        slot, token, value, until = list(zip(*chain.from_iterable(entries), strict=True)) or [(), (), (), ()]
        return {
            "bias_slot": array(slot),
            "bias_token": array(token),
            "bias_value": array(value, np.float32),
            "bias_until": array(until),
            **self._prefix_columns(slots),
        }

    def _prefix_columns(self, slots: Sequence[int]) -> dict[str, np.ndarray]:
        """Return the tokens that have to precede the first bias entries of `slots`: those of `_bans` with a prefix."""
        rows = [(slot, sequence[-2::-1]) for slot in slots for sequence in self._bans(slot) if len(sequence) > 1]
        prefix = np.full((len(rows), max((len(before) for _, before in rows), default=0)), -1, np.int32)
        for row, (_, before) in zip(prefix, rows, strict=True):
            row[: len(before)] = before
        return {"prefix_slot": array([slot for slot, _ in rows]), "prefix": prefix}

    def _bans(self, slot: int) -> Sequence[tuple[int, ...]]:
        """Return the sequences that the slot must not generate, those of several tokens first."""
        return sorted(self._request(slot).banned, key=len, reverse=True)

    def _biases(self, slot: int, params: SamplingParams) -> list[tuple[int, int, float, int]]:
        """Return bias table entries: −inf for the last token of each banned sequence, then logit_bias, both at all
        positions, and −inf for ending tokens until min_tokens.
        """
        entries = [(slot, sequence[-1], float("-inf"), NEVER) for sequence in self._bans(slot)]
        entries += [(slot, token, value, NEVER) for token, value in (params.logit_bias or {}).items()]
        if params.min_tokens:
            until = int(self.table.unstopped_length[slot])
            ends = {*params.stop_token_ids, *(() if params.ignore_eos else self.eos_ids)}
            entries += [(slot, token, float("-inf"), until) for token in sorted(ends)]
        return entries

    def _params(self, slot: int) -> SamplingParams:
        return self._request(slot).params

    def _request(self, slot: int) -> Request:
        request = self.table.requests[slot]
        assert request is not None
        return request


PLAIN = SamplingParams(temperature=0, seed=0)


def _column(params: Sequence[SamplingParams], name: str, column: DeviceColumn) -> np.ndarray:
    """Return the values of one parameter, clipped to 0 and NEVER if its column is int32."""
    values = [getattr(one, name) for one in params]
    if column.dtype == "int32":
        values = [min(max(value, 0), NEVER) for value in values]
    return np.array(values, column.dtype)


def _rows(mask: np.ndarray) -> Int32:
    return mask.nonzero()[0].astype(np.int32)

"""Draft tokens by n-gram lookup on the device, advance sequences past accepted ones, and learn the tokens of each step.

`draft_arrays` runs on the host, before the step's arrays are staged; see `StepInput` for the order of the rest. CUDA
graphs have `NgramDrafter.draft` and `NgramDrafter.advance` of decode steps, with a fixed number of drafts.

Legend: n sequences with draft rows, k drafted tokens, D decode rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tok_core.messages import StepInput, StepOutput
from tok_core.worker.staging import copy_to_host
from tok_core.worker.state import WorkerState
from tok_core.worker.step_tensors import decode_row_of, draft_slots
from tok_kernels import AGE_TOKENS, Backend, DraftRows


def draft_arrays(step: StepInput, *, graph: bool = False, biased: bool) -> dict[str, np.ndarray]:
    """Return the host arrays that `NgramDrafter` needs, by name; only non-empty ones.

    graph   whether a CUDA graph replays the step, which has `padded_draft_rows`
    biased  whether any slot may have logit biases, which the slots of drafted tokens get, too
    """
    arrays = {"predict_slot": step.predict_slot, "chunk_count": step.prefill_count}
    if step.verify_rows is not None:
        lent = step.verify_rows.lent
        if not graph:
            arrays["drafts"] = padded_draft_rows(step, len(lent), lent.shape[1])
        if biased:
            arrays["biased_slot"] = lent[lent >= 0].astype(np.int64)
            arrays["biased_source"] = np.repeat(step.verify_rows.parent, (lent >= 0).sum(1)).astype(np.int64)
    return {name: array for name, array in arrays.items() if len(array)}


def padded_draft_rows(step: StepInput | None, sequences: int, longest: int, padding_slot: int = 0) -> NDArray[np.int32]:
    """Return the fields of `DraftRows`, int32 `[3, 1 + longest, sequences]`, padded; step None: padding only."""
    drafts = np.full((3, 1 + longest, sequences), -1, np.int32)
    drafts[0, 0] = padding_slot
    if step is not None and step.verify_rows is not None:
        slot, given = draft_slots(step).T, step.verify_rows.given.T
        tokens, count = given.shape
        drafts[0, : 1 + tokens, :count] = slot
        drafts[1, : 1 + tokens, :count] = decode_row_of(step)[slot]
        drafts[2, 1 : 1 + tokens, :count] = given
    return drafts


@dataclass(frozen=True, slots=True)
class DraftOutputs:
    """The fields `accepted`, `predictable` and `predicted` of a StepOutput, one after the other in an int32 tensor.

    sequences, rows        entries of the first two in the tensor, with padding
    accepted, predictable  number of entries of these
    predicted              shape of the last
    """

    values: Tensor
    sequences: int
    rows: int
    accepted: int
    predictable: int
    predicted: tuple[int, int]

    def fill(self, output: StepOutput) -> None:
        """Set the fields of the step's output; the tensor is on the host and valid."""
        accepted, predictable, predicted = np.split(self.values.numpy(), np.cumsum((self.sequences, self.rows)))
        output.accepted, output.predictable = accepted[: self.accepted], predictable[: self.predictable]
        output.predicted = predicted.reshape(self.predicted)


class NgramDrafter:
    """Drafts tokens of decode rows, and learns, for a worker with all layers of the model.

    The manager never waits for the values of drafts: everything that depends on them happens on the device.
    """

    def __init__(self, backend: Backend, state: WorkerState) -> None:
        assert state.ngrams is not None
        self._backend = backend
        self._state = state
        self._ngrams = state.ngrams
        self._learned = 0  # tokens since the counts were halved
        self._ngrams.age()  # loads its kernels

    def reset(self) -> None:
        """Forget what was learned."""
        self._ngrams.clear()
        self._learned = 0

    def draft(self, drafts: DraftRows) -> Tensor:
        """Draft tokens and set the slots that feed them, before the forward pass; return them, int64 `[k, n]`."""
        state = self._state
        draft_kn = self._backend.draft_tokens(drafts, state.columns, self._ngrams)
        self._backend.set_draft_slots(drafts, draft_kn, state.all_columns, state.columns)
        return draft_kn

    def copy_biases(self, staged: Mapping[str, Tensor]) -> None:
        """Give the slots of drafted tokens the logit biases of their sequences, if the step has any."""
        if "biased_slot" in staged:
            self._state.biases.copy(staged["biased_slot"], staged["biased_source"])

    def advance(self, slot_D: Tensor, drafts: DraftRows | None, draft_kn: Tensor | None) -> Tensor:
        """Advance sequences past accepted drafts and learn, once the tokens of decode rows are sampled.

        drafts, draft_kn  the drafts that the step verifies, and their tokens; None: it has none

        Return int32 `[n + D]`: how many tokens of each draft are accepted, then how many tokens of each row were
        predictable.
        """
        columns, count_D = self._state.columns, torch.ones_like(slot_D)
        if drafts is None or draft_kn is None:
            return self._backend.learn_tokens(slot_D, count_D, 1, columns, self._ngrams)
        accepted_n = self._backend.accept_drafts(drafts, draft_kn, count_D, columns)
        longest = 1 + len(draft_kn)
        predictable_D = self._backend.learn_tokens(slot_D, count_D, longest, columns, self._ngrams)
        return torch.cat((accepted_n, predictable_D))

    def finish(self, step: StepInput, staged: Mapping[str, Tensor], advanced: Tensor, sequences: int) -> DraftOutputs:
        """Learn prompts, predict what the step asks for, and enqueue the copy of all outputs to the host.

        advanced   result of `advance`
        sequences  its number of drafts, with padding
        """
        columns, decode = self._state.columns, len(step.decode_slot)
        if chunks := len(step.prefill_slot):
            slot = staged["slots"][decode : decode + chunks]
            longest = int(step.prefill_count.max())
            self._backend.learn_tokens(slot, staged["chunk_count"], longest, columns, self._ngrams)
        rows, values = len(advanced) - sequences, advanced
        asked = len(step.predict_slot), step.predicted_tokens
        if asked[0]:
            predicted = self._backend.predict_tokens(staged["predict_slot"], asked[1], columns, self._ngrams)
            values = torch.cat((advanced, predicted.int().flatten()))
        self._learned += decode + len(step.prefill_token)
        if self._learned >= AGE_TOKENS:
            self._ngrams.age()
            self._learned = 0
        accepted = 0 if step.verify_rows is None else len(step.verify_rows.parent)
        return DraftOutputs(copy_to_host(values), sequences, rows, accepted, decode, asked)

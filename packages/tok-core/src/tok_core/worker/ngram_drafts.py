"""Draft tokens by n-gram lookup on the device, advance sequences past accepted ones, and learn the tokens of each step.

`draft_arrays` runs on the host, before the step's arrays are staged; see `StepInput` for the order of the rest.

Legend: n sequences with draft rows, k drafted tokens, D decode rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tok_core.messages import StepInput, StepOutput, VerifyRows
from tok_core.worker.staging import copy_to_host
from tok_core.worker.state import WorkerState
from tok_kernels import AGE_TOKENS, Backend, DraftSlots


def draft_arrays(step: StepInput) -> dict[str, np.ndarray]:
    """Return the host arrays that `NgramDrafter` needs, by name; only non-empty ones."""
    arrays = {} if step.verify_rows is None else _row_arrays(step.verify_rows, step.decode_slot)
    arrays |= {"predict_slot": step.predict_slot, "chunk_count": step.prefill_count}
    return {name: array for name, array in arrays.items() if len(array)}


def _row_arrays(rows: VerifyRows, decode_slot: np.ndarray) -> dict[str, np.ndarray]:
    """Return the host arrays of draft rows; `lent_index` is the index of each row in the flattened `[n, k]`."""
    index = (rows.lent.flatten() >= 0).nonzero()[0]
    lent = rows.lent.flatten()[index]
    row_of = np.zeros(int(decode_slot.max()) + 1, np.int64)
    row_of[decode_slot] = np.arange(len(decode_slot))
    return {
        "draft_parent": rows.parent,
        "draft_parent_row": row_of[rows.parent],
        "draft_lent": rows.lent,
        **({"draft_given": rows.given} if (rows.given >= 0).any() else {}),
        "lent_index": index,
        "lent_slot": lent.astype(np.int64),
        "lent_source": rows.parent[index // rows.lent.shape[1]].astype(np.int64),
        "lent_row": row_of[lent],
    }


class DraftOutputs(NamedTuple):
    """The fields `accepted`, `predictable` and `predicted` of a StepOutput, one after the other in an int32 tensor.

    accepted, predictable  number of entries of these
    predicted              shape of this
    """

    values: Tensor
    accepted: int
    predictable: int
    predicted: tuple[int, int]

    def fill(self, output: StepOutput) -> None:
        """Set the fields of the step's output; the tensor is on the host and valid."""
        ends = np.cumsum((self.accepted, self.predictable))
        output.accepted, output.predictable, predicted = np.split(self.values.numpy(), ends)
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
        self._ones = torch.ones(state.slots, dtype=torch.int32, device=state.device)
        self._learned = 0  # tokens since the counts were halved
        self._ngrams.age()  # loads its kernels

    def reset(self) -> None:
        """Forget what was learned."""
        self._ngrams.clear()
        self._learned = 0

    def draft(self, step: StepInput, staged: Mapping[str, Tensor]) -> Tensor | None:
        """Draft the tokens of the step's `verify_rows`, before the forward pass; return them, int64 `[n, k]`."""
        if step.verify_rows is None:
            return None
        longest = step.verify_rows.lent.shape[1]
        draft_nk = self._backend.predict_tokens(staged["draft_parent"], longest, self._state.columns, self._ngrams)
        if "draft_given" in staged:
            given_nk = staged["draft_given"].long()
            draft_nk = torch.where(given_nk >= 0, given_nk, draft_nk)
        lent, state = DraftSlots(staged["lent_slot"], staged["lent_source"], staged["lent_index"]), self._state
        self._backend.set_draft_slots(lent, draft_nk, state.all_columns, step.max_kv, state.columns)
        state.biases.copy(lent.slot, lent.source)
        return draft_nk

    def advance(self, step: StepInput, staged: Mapping[str, Tensor], draft_nk: Tensor | None) -> DraftOutputs:
        """Advance sequences past accepted drafts, learn, and predict, once the step's tokens are sampled."""
        backend, columns, decode = self._backend, self._state.columns, len(step.decode_slot)
        slot_D = staged["slots"][:decode]
        count_D, parts = self._ones[:decode], list[Tensor]()
        if draft_nk is not None:
            accepted_n = backend.accept_drafts(staged["draft_parent"], staged["draft_lent"], draft_nk, columns)
            count_D = count_D.index_fill(0, staged["lent_row"], 0)
            count_D.index_add_(0, staged["draft_parent_row"], accepted_n)
            parts.append(accepted_n)
        most = 1 if draft_nk is None else 1 + draft_nk.shape[1]
        parts.append(backend.learn_tokens(slot_D, count_D, most, columns, self._ngrams))
        if chunks := len(step.prefill_slot):
            slot = staged["slots"][decode : decode + chunks]
            backend.learn_tokens(slot, staged["chunk_count"], int(step.prefill_count.max()), columns, self._ngrams)
        asked = len(step.predict_slot), step.predicted_tokens
        if asked[0]:
            predicted = backend.predict_tokens(staged["predict_slot"], asked[1], columns, self._ngrams)
            parts.append(predicted.int().flatten())
        self._learned += decode + len(step.prefill_token)
        if self._learned >= AGE_TOKENS:
            self._ngrams.age()
            self._learned = 0
        values = torch.cat(parts) if len(parts) > 1 else parts[0]
        return DraftOutputs(copy_to_host(values), 0 if draft_nk is None else len(draft_nk), decode, asked)

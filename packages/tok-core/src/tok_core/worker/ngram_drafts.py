"""Draft tokens by n-gram lookup on the device, advance sequences past accepted ones, and learn the tokens of each step.

`draft_arrays` runs on the host, before the step's arrays are staged; see `StepInput` for the order of the rest.

Legend: n sequences with draft rows, k drafted tokens, D decode rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tok_core.messages import StepInput, StepOutput
from tok_core.worker.staging import copy_to_host
from tok_core.worker.state import WorkerState
from tok_core.worker.step_tensors import decode_row_of, draft_slots
from tok_kernels import AGE_TOKENS, Backend, DraftRows


def draft_arrays(step: StepInput, *, biased: bool = False) -> dict[str, np.ndarray]:
    """Return the host arrays that `NgramDrafter` needs, by name; only non-empty ones.

    biased  whether any slot may have logit biases, which the slots of drafted tokens get, too
    """
    arrays = {}
    if step.verify_rows is not None:
        arrays["drafts"] = _draft_rows(step, step.verify_rows.given)
        if biased:
            lent = step.verify_rows.lent
            arrays["biased_slot"] = lent[lent >= 0].astype(np.int64)
            arrays["biased_source"] = np.repeat(step.verify_rows.parent, (lent >= 0).sum(1)).astype(np.int64)
    arrays |= {"predict_slot": step.predict_slot, "chunk_count": step.prefill_count}
    return {name: array for name, array in arrays.items() if len(array)}


def _draft_rows(step: StepInput, given: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the fields of `DraftRows`, int32 `[3, 1 + k, n]`."""
    slot = draft_slots(step).T
    drafts = np.full((3, *slot.shape), -1, np.int32)
    drafts[0], drafts[1], drafts[2, 1:] = slot, decode_row_of(step)[slot], given.T
    return drafts


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
        """Draft the tokens of the step's `verify_rows`, before the forward pass; return them, int64 `[k, n]`."""
        if step.verify_rows is None:
            return None
        drafts, state = DraftRows(*staged["drafts"]), self._state
        draft_kn = self._backend.draft_tokens(drafts, state.columns, self._ngrams)
        self._backend.set_draft_slots(drafts, draft_kn, state.all_columns, state.columns)
        if "biased_slot" in staged:
            state.biases.copy(staged["biased_slot"], staged["biased_source"])
        return draft_kn

    def advance(self, step: StepInput, staged: Mapping[str, Tensor], draft_kn: Tensor | None) -> DraftOutputs:
        """Advance sequences past accepted drafts, learn, and predict, once the step's tokens are sampled."""
        backend, columns, decode = self._backend, self._state.columns, len(step.decode_slot)
        slot_D = staged["slots"][:decode]
        count_D, parts = self._ones[:decode], list[Tensor]()
        if draft_kn is not None:
            count_D = count_D.clone()
            parts.append(backend.accept_drafts(DraftRows(*staged["drafts"]), draft_kn, count_D, columns))
        most = 1 if draft_kn is None else 1 + len(draft_kn)
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
        return DraftOutputs(copy_to_host(values), 0 if draft_kn is None else draft_kn.shape[1], decode, asked)

"""N-gram drafts of a worker: draft rows stand for their sequences, accepted drafts advance these, steps are learned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from support.tiny_models import make_model
from tok_core.messages import StepInput, StepOutput, VerifyRows
from tok_core.model_config import ModelConfig
from tok_core.model_config.model_config import read_config
from tok_core.worker.ngram_drafts import DraftOutputs, NgramDrafter, draft_arrays
from tok_core.worker.staging import Staging
from tok_core.worker.startup.dummy_steps import dummy_step
from tok_core.worker.state import WorkerState, state_changes
from tok_core.worker.step_tensors import build_step_tensors, step_arrays
from tok_kernels import DraftRows
from tok_kernels.backends.reference import ReferenceBackend

CPU = torch.device("cpu")
PAGE, PAGES, SLOTS = 4, 6, 8
TEXT = [11, 12, 13, 14, 15, 16, 17, 18]
UNKNOWN = 99


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return read_config(make_model("llama", tmp_path_factory.mktemp("drafts") / "llama"))


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@dataclass
class Worker:
    """State and drafter of a worker, without a model: a test says what each row samples."""

    state: WorkerState
    backend: ReferenceBackend
    drafter: NgramDrafter

    def set_sequence(self, slot: int, *tokens: int) -> None:
        """Give a slot its pages, with all tokens but the last one in the cache."""
        columns = self.state.columns
        columns.page_table[slot] = torch.arange(slot * PAGES, (slot + 1) * PAGES)
        columns.token_of[slot * PAGES * PAGE :][: len(tokens) - 1] = torch.tensor(tokens[:-1])
        columns.length[slot], columns.last_token[slot], columns.ended[slot] = len(tokens) - 1, tokens[-1], 0

    def prefill(self, slot: int, *tokens: int) -> StepOutput:
        """Compute a prompt, which is learned, and sample UNKNOWN."""
        self.set_sequence(slot, UNKNOWN)
        step = dummy_step(chunks=1, tokens=len(tokens))
        step.prefill_slot, step.prefill_token, step.sample_slot = ints(slot), ints(*tokens), ints(slot)
        return self.run(step, [UNKNOWN])

    def set_rows(self, step: StepInput) -> torch.Tensor | None:
        """Apply the step and set its draft rows; return the drafted tokens, `[k, n]`."""
        self.staged = Staging(CPU, 1).put(step_arrays(step) | state_changes(step) | draft_arrays(step, biased=True))
        self.state.apply(step, self.staged)
        self.drafter.copy_biases(self.staged)
        return None if step.verify_rows is None else self.drafter.draft(DraftRows(*self.staged["drafts"]))

    def run(self, step: StepInput, sampled: list[int]) -> StepOutput:
        """Run a step whose rows sample these tokens; return its output."""
        drafted = self.set_rows(step)
        build_step_tensors(self.backend, self.state, step, self.staged, None)
        token, logprob = torch.tensor(sampled), torch.zeros(len(sampled))
        slot = torch.from_numpy(step.sample_slot)
        self.backend.record_sampled_tokens(slot, token, logprob, self.state.columns)
        none = np.empty((len(sampled), 0))
        output = StepOutput(0, token.int().numpy(), logprob.numpy(), none.astype(np.int32), none, 0.0, 0.0)
        drafts = None if drafted is None else DraftRows(*self.staged["drafts"])
        advanced = self.drafter.advance(self.staged["slots"][: len(step.decode_slot)], drafts, drafted)
        self.drafter.finish(step, self.staged, advanced, 0 if drafted is None else drafted.shape[1]).fill(output)
        return output

    def slot(self, slot: int) -> tuple[int, int, int]:
        """Return length, last token, and whether the slot has ended."""
        columns = self.state.columns
        length, last_token, ended = (int(one[slot]) for one in (columns.length, columns.last_token, columns.ended))
        return length, last_token, ended


@pytest.fixture
def worker(model: ModelConfig) -> Worker:
    sizes: dict[str, Any] = {"slots": SLOTS, "num_pages": SLOTS * PAGES, "page_size": PAGE, "pages_per_slot": PAGES}
    state = WorkerState(model, CPU, torch.float32, **sizes, max_draft_tokens=4)
    backend = ReferenceBackend()
    return Worker(state, backend, NgramDrafter(backend, state))


def decode_step(
    *slots: int, lent: list[list[int]] | None = None, given: list[list[int]] | None = None, predicted: int = 0
) -> StepInput:
    """Return a step in which rows of `lent` verify drafts of the first slots; the first slots are predicted."""
    rows = None
    if lent is not None:
        slots_of_rows = np.array(lent, np.int32)
        tokens = np.full_like(slots_of_rows, -1) if given is None else np.array(given, np.int32)
        rows = VerifyRows(ints(*slots[: len(lent)]), slots_of_rows, tokens)
        slots = (*slots, *slots_of_rows[slots_of_rows >= 0].tolist())
    step = dummy_step(decode=len(slots))
    step.decode_slot = step.sample_slot = ints(*slots)
    return structs.replace(
        step,
        max_kv=PAGES * PAGE,
        verify_rows=rows,
        predict_slot=ints(*slots[:predicted]),
        predicted_tokens=3 if predicted else 0,
    )


def test_draft_rows_have_the_next_positions_tokens_and_pages(worker: Worker) -> None:
    worker.prefill(0, *TEXT)
    worker.set_sequence(1, 1, 2, 3, 11, 12)
    worker.set_sequence(2, 5, 13)
    drafted = worker.set_rows(decode_step(1, 2, lent=[[5, 6, 7], [3, -1, -1]]))
    assert drafted is not None
    assert drafted[:, 0].tolist() == [13, 14, 15]
    assert drafted[0, 1] == 14
    assert [worker.slot(slot) for slot in (5, 6, 7)] == [(5, 13, 0), (6, 14, 0), (7, 15, 0)]
    assert worker.slot(3) == (2, 14, 0)
    assert worker.slot(1) == (4, 12, 0)
    table = worker.state.columns.page_table
    assert (table[[5, 6, 7], :2] == table[1, :2]).all()
    assert table[3, 0] == table[2, 0]


def test_pages_after_a_drafted_token_are_left_as_they_are(worker: Worker) -> None:
    worker.set_sequence(1, 1, 2, 3)
    before = worker.state.columns.page_table[5].clone()
    worker.set_rows(decode_step(1, lent=[[5]], given=[[4]]))
    table = worker.state.columns.page_table
    assert table[5].tolist() == [int(table[1, 0]), *before[1:].tolist()]


def test_row_without_a_prediction_ends_and_so_do_those_after_it(worker: Worker) -> None:
    worker.prefill(0, *TEXT)
    worker.set_sequence(1, 1, 2, 16)
    worker.set_sequence(2, 1, UNKNOWN)
    step = decode_step(1, 2, lent=[[5, 6, 7], [3, 4, -1]])
    output = worker.run(step, [17, 18, 18, UNKNOWN, 0, 0, 0])
    assert output.accepted.tolist() == [2, 0]  # no token was known to follow 18
    assert worker.slot(1) == (5, UNKNOWN, 0)
    assert worker.slot(2) == (2, 18, 0)
    assert [worker.slot(slot)[2] for slot in (5, 6, 7, 3, 4)] == [0, 0, 1, 1, 1]


def test_accepted_drafts_advance_the_sequence_and_others_do_not(worker: Worker) -> None:
    worker.prefill(0, *TEXT)
    worker.set_sequence(1, 11, 12)
    worker.set_sequence(2, 11, 12)
    worker.set_sequence(3, 11, 12)
    step = decode_step(1, 2, 3, lent=[[5, 6], [4, 7]])  # slot 3 has no drafts
    output = worker.run(step, [13, 30, 13, 14, 31, 50, 51])
    assert output.accepted.tolist() == [2, 0]
    assert worker.slot(1) == (4, 31, 0)
    assert worker.slot(2) == (2, 30, 0)
    assert worker.slot(3) == (2, 13, 0)
    assert worker.state.columns.token_of[PAGES * PAGE :][:4].tolist() == [11, 12, 13, 14]


def test_sequence_ends_where_an_accepted_row_samples_an_end_token(worker: Worker) -> None:
    end = int(worker.state.columns.end_ids[0])
    worker.prefill(0, 11, end, 12, 13, 14)
    worker.set_sequence(1, 11)
    output = worker.run(decode_step(1, lent=[[5, 6]], given=[[12, end]]), [12, end, 13])
    assert output.accepted.tolist() == [1]  # nothing follows an end token
    assert worker.slot(1)[1:] == (end, 1)


def test_given_tokens_win_over_predictions_and_are_continued(worker: Worker) -> None:
    worker.prefill(0, *TEXT)
    worker.set_sequence(1, 1, 12)
    drafted = worker.set_rows(decode_step(1, lent=[[5, 6, 7]], given=[[40, 13, -1]]))
    assert drafted is not None
    assert drafted[:, 0].tolist() == [40, 13, 14]
    assert [worker.slot(slot) for slot in (5, 6, 7)] == [(2, 40, 0), (3, 13, 0), (4, 14, 0)]


def test_draft_rows_take_over_sampling_parameters_and_biases(worker: Worker) -> None:
    state = worker.state
    for number, columns in enumerate(state._columns_of_dtype.values()):
        columns[:, :] = 0
        columns[:, 1] = torch.arange(1, len(columns) + 1) + number
    worker.set_sequence(1, 11, 12)
    tables = state.biases
    tables.token, tables.value = torch.zeros((SLOTS, 2), dtype=torch.int64), torch.zeros((SLOTS, 2))
    tables.until, tables.prefix = torch.zeros_like(tables.token), torch.zeros((SLOTS, 1, 3), dtype=torch.int64)
    biases = tables.token, tables.value, tables.until, tables.prefix
    for number, bias in enumerate(biases, 1):
        bias[1] = number
    worker.set_rows(decode_step(1, lent=[[5, 6]], given=[[13, 14]]))
    for name in (*state.sampling, "prompt_len"):
        column = state.prompt_len if name == "prompt_len" else state.sampling[name]
        assert column[1] != 0
        assert column[5] == column[6] == column[1], name
    assert (state.random_keys[:2, 5] == state.random_keys[:2, 1]).all()
    assert state.ngrams is not None
    assert state.ngrams.salt[5] == state.ngrams.salt[1] != 0
    for bias in biases:
        assert (bias[5] == bias[1]).all()
        assert (bias[6] == bias[1]).all()
        assert not bias[2].any()


def test_slots_of_different_salts_learn_nothing_from_each_other(worker: Worker) -> None:
    assert worker.state.ngrams is not None
    worker.state.ngrams.salt[2] = 7
    worker.prefill(0, *TEXT)
    worker.set_sequence(1, 1, 12)
    worker.set_sequence(2, 1, 12)
    drafted = worker.set_rows(decode_step(1, 2, lent=[[5], [6]]))
    assert drafted is not None
    assert drafted.tolist() == [[13, -1]]


def test_tokens_of_rejected_drafts_are_not_learned(worker: Worker) -> None:
    worker.set_sequence(1, 1, 12)
    worker.run(decode_step(1, lent=[[5, 6]], given=[[40, 41]]), [30, 0, 0])
    worker.run(decode_step(1), [31])
    worker.set_sequence(2, 9, 12)
    worker.set_sequence(3, 9, 40)
    drafted = worker.set_rows(decode_step(2, 3, lent=[[5], [6]]))
    assert drafted is not None
    assert drafted.tolist() == [[30, -1]]


def test_outputs_count_predictable_tokens_and_predict_asked_slots(worker: Worker) -> None:
    worker.prefill(0, *TEXT)
    worker.set_sequence(1, 11, 12)
    worker.set_sequence(2, 11, 50)
    output = worker.run(decode_step(1, 2, lent=[[5, 6]], predicted=2), [13, 17, 14, 15])
    assert output.accepted.tolist() == [2]
    assert output.predictable.tolist() == [3, 0, 0, 0]  # 12 after 11, and two drafted tokens; 50 follows nothing
    assert output.predicted.tolist() == [[16, 17, 18], [18, -1, -1]]


def test_step_without_drafts_and_predictions_returns_empty_fields(worker: Worker) -> None:
    worker.prefill(0, *TEXT)
    worker.set_sequence(1, 11, 12)
    output = worker.run(decode_step(1), [13])
    assert output.accepted.shape == (0,)
    assert output.predictable.tolist() == [1]
    assert output.predicted.size == 0


def test_draft_outputs_split_one_tensor_into_the_fields_of_an_output() -> None:
    none = np.empty((0, 0))
    output = StepOutput(0, ints(), none, ints(), none, 0.0, 0.0)
    values, padded = torch.arange(14, dtype=torch.int32), {"sequences": 3, "rows": 5}
    DraftOutputs(values, **padded, accepted=2, predictable=3, predicted=(2, 3)).fill(output)
    assert output.accepted.tolist() == [0, 1]
    assert output.predictable.tolist() == [3, 4, 5]
    assert output.predicted.tolist() == [[8, 9, 10], [11, 12, 13]]


def test_counts_are_halved_after_many_learned_tokens(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tok_core.worker.ngram_drafts.AGE_TOKENS", 2 * len(TEXT) + 1)
    ngrams = worker.state.ngrams
    assert ngrams is not None
    for _ in range(2):
        worker.prefill(0, *TEXT)
    assert int(ngrams.total.max()) == 2
    worker.set_sequence(1, 90)
    worker.run(decode_step(1), [91])
    assert int(ngrams.total.max()) == 1
    worker.run(decode_step(1), [92])  # counting begins anew
    assert int(ngrams.total.max()) == 1
    for _ in range(2):
        worker.prefill(0, *TEXT)
    assert int(ngrams.total.max()) == 1

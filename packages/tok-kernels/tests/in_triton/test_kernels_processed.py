"""Tests of processed log-probabilities: those of the distribution that a token is sampled from, in both backends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from support.contexts import contexts_of
from support.interpreted import outside, rerun
from support.shards import draw_together
from tok_kernels import Filters, LogitBias, Penalties, Sampled, SamplingBatch
from tok_kernels.backends.reference import ReferenceBackend
from tok_kernels.backends.triton import TritonBackend
from tok_kernels.batch import Shards

ROWS, VOCABULARY = 12, 1500
BACKENDS = [ReferenceBackend(), TritonBackend()]
TOP_K, TOP_P, MIN_P = [0, 5, 0, 0, 9, 0], [1.0, 1.0, 0.6, 1.0, 0.7, 0.999], [0.0, 0.0, 0.0, 0.3, 0.2, 0.0]
FILTERS: list[list[Any]] = [TOP_K, TOP_P, MIN_P]


# The interpreter's NumPy arrays warn of overflowing exponents and rows of −inf; a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore:.*(overflow|invalid value|All-NaN slice) encountered:RuntimeWarning")


@outside
def test_the_tests_of_this_file_pass_under_the_interpreter() -> None:
    rerun(__file__)


def plain_logprobs(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Return the log-probabilities of one row of edited logits, in float64, as transformers' warpers define them."""
    if temperature == 0:
        return logits.double().log_softmax(-1)
    scores = logits.double() / temperature
    if top_k:
        scores[scores < scores.topk(top_k).values[-1]] = -torch.inf
    if top_p < 1:
        ranked, token = scores.sort(descending=True, stable=True)
        mass = ranked.softmax(-1)
        scores[token[(mass.cumsum(-1) - mass) >= top_p]] = -torch.inf
    if min_p:
        mass = scores.softmax(-1)
        scores[mass < min_p * mass.max()] = -torch.inf
    return scores.log_softmax(-1)


def batch_of(device: torch.device) -> SamplingBatch:
    count = torch.arange(ROWS, device=device)
    temperature = torch.tensor([0.0, 0.3, 1.0, 1.7] * 3, device=device)
    return SamplingBatch(temperature, count * 0 + 3, count * 0, count, processed=True)


def logits_of(device: torch.device) -> Tensor:
    return (torch.randn((ROWS, VOCABULARY), generator=torch.Generator().manual_seed(1)) * 3).to(device)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("top", [0, 4])
@pytest.mark.parametrize("edited", [False, True])
@pytest.mark.parametrize("filtered", [False, True])
def test_processed_logprobs_equal_those_of_plain_torch(
    backend: ReferenceBackend | TritonBackend, filtered: bool, edited: bool, top: int, device: torch.device
) -> None:
    logits, batch = logits_of(device), batch_of(device)
    expected_of = logits.clone()
    columns: list[list[Any]] = [[0] * ROWS, [1.0] * ROWS, [0.0] * ROWS]
    if edited:
        rows = torch.tensor([1, 6, 11], device=device)
        bias = LogitBias(rows, rows * 7, torch.tensor([9.0, 12.0, -torch.inf], device=device))
        one = torch.ones(2, device=device)
        penalties = Penalties(rows[:2], contexts_of([[3]] * 2, [[8, 8]] * 2, device), one, one / 2, one * 1.5)
        batch = replace(batch, bias=bias, penalties=penalties)
        for row in rows[:2].tolist():
            for token, taken in ((3, 0.0), (8, 2.0)):
                value = expected_of[row, token]
                expected_of[row, token] = (value / 1.5 if value > 0 else value * 1.5) - taken
        expected_of[rows, rows * 7] += bias.value
    if filtered:
        columns = [values * 2 for values in FILTERS]
        chosen = torch.tensor([row for row in range(ROWS) if row % 6], device=device)
        column = [torch.tensor(values, device=device)[chosen] for values in columns]
        batch = replace(batch, filters=Filters(chosen, column[0].int(), column[1], column[2]))
        if top:
            batch = replace(batch, top_rows=torch.tensor([2, 4, 7, 11], device=device))
    batch = replace(batch, top_logprobs=top)
    result = backend.sample(logits, batch)
    for row in range(ROWS):
        values = [column[row] for column in columns]
        exact = plain_logprobs(expected_of[row], float(batch.temperature[row]), *values)
        assert result.logprob[row].item() == pytest.approx(exact[result.token[row]].item(), abs=2e-5)
        if top and (batch.top_rows is None or row in batch.top_rows):
            best = exact.topk(top)
            found = result.top_logprob[row].double()
            torch.testing.assert_close(found, best.values, rtol=0, atol=2e-5)
            possible = best.values > -torch.inf
            assert result.top_token[row][possible].tolist() == best.indices[possible].tolist()


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_processed_mode_samples_the_same_tokens(
    backend: ReferenceBackend | TritonBackend, device: torch.device
) -> None:
    logits, batch = logits_of(device), batch_of(device)
    rows = torch.arange(ROWS, device=device)
    columns = [torch.tensor(values * 2, device=device) for values in FILTERS]
    batch = replace(batch, filters=Filters(rows, columns[0].int(), columns[1], columns[2]))
    raw = replace(batch, processed=False)
    assert torch.equal(backend.sample(logits, batch).token, backend.sample(logits, raw).token)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_a_row_without_a_distribution_has_no_finite_processed_logprob(
    backend: ReferenceBackend | TritonBackend, device: torch.device
) -> None:
    logits, batch = logits_of(device), batch_of(device)
    logits[3] = -torch.inf
    assert backend.sample(logits, batch).logprob[3].item() == -torch.inf


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_processed_logprobs_over_a_sharded_vocabulary_equal_plain_torch(
    backend: ReferenceBackend | TritonBackend, device: torch.device
) -> None:
    logits, batch = logits_of(device), batch_of(device)

    def sample(part: Tensor, shards: Shards) -> Sampled:
        return backend.sample(part, replace(batch, shards=shards))

    for result in draw_together(logits, [700], sample):
        for row in range(ROWS):
            exact = plain_logprobs(logits[row], float(batch.temperature[row]), 0, 1.0, 0.0)
            assert result.logprob[row].item() == pytest.approx(exact[result.token[row]].item(), abs=2e-5)

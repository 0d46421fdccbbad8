"""Tests of Triton sampling against the reference: equal tokens unless rounding decides, equal log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from support.contexts import contexts_of
from support.interpreted import INTERPRETING, outside, rerun
from tok_kernels import Filters, LogitBias, Penalties, Sampled, SamplingBatch
from tok_kernels.backends.reference import ReferenceBackend
from tok_kernels.sampling.reference.philox import uniform
from tok_kernels.sampling.triton import edits as sampling_edits
from tok_kernels.sampling.triton.sampling import sample

reference = ReferenceBackend()

INF = torch.inf
CUDA = torch.device("cuda")

# The interpreter's NumPy arrays warn of overflowing exponents and rows of NaN; a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore:.*(overflow|invalid value|All-NaN slice) encountered:RuntimeWarning")


@outside
def test_the_tests_of_this_file_pass_under_the_interpreter() -> None:
    rerun(__file__)


def batch_of(rows: int, temperature: float, device: torch.device, seed: int = 0) -> SamplingBatch:
    """Return a batch whose rows differ in seed, sample and position."""
    count = torch.arange(rows, device=device)
    return SamplingBatch(torch.full((rows,), temperature, device=device), count * 7919 + seed, count % 5, count)


def part_of(batch: SamplingBatch, index: Tensor) -> SamplingBatch:
    return SamplingBatch(batch.temperature[index], batch.seed[index], batch.sample[index], batch.position[index])


def logits_of(rows: int, vocabulary: int, device: torch.device, spread: float = 3.0, seed: int = 0) -> Tensor:
    source = torch.Generator(device).manual_seed(rows * vocabulary + seed)
    return torch.randn((rows, vocabulary), generator=source, device=device) * spread


def assert_in_its_place(logits: Tensor, batch: SamplingBatch, token: Tensor, slack: float = 1e-6) -> None:
    """Check that each token's interval of the exact CDF holds the row's uniform number."""
    weight = (logits.double() / batch.temperature.double().unsqueeze(-1)).softmax(-1)
    high = weight.cumsum(-1).gather(-1, token.unsqueeze(-1)).squeeze(-1)
    own = weight.gather(-1, token.unsqueeze(-1)).squeeze(-1)
    u = uniform(batch.seed, batch.sample, batch.position)
    assert (own > 0).all()
    assert (u < high + slack).all()
    assert (u >= high - own - slack).all()


def assert_logprobs(logits: Tensor, result: Sampled) -> None:
    exact = logits.double().log_softmax(-1).gather(-1, result.token.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(result.logprob.double(), exact, rtol=1e-6, atol=1e-5)


def assert_same(result: Sampled, expected: Sampled) -> None:
    assert torch.equal(result.token, expected.token)
    torch.testing.assert_close(result.logprob, expected.logprob, rtol=1e-6, atol=1e-5)
    assert torch.equal(result.top_token, expected.top_token)
    torch.testing.assert_close(result.top_logprob, expected.top_logprob, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "vocabulary", "temperature"),
    [(1, 1, 1.0), (20, 2, 1.0), (10, 1023, 0.6), (10, 1024, 1.0), (10, 1025, 0.6), (20, 5000, 1.7)],
)
def test_sampled_tokens_equal_the_reference(
    rows: int, vocabulary: int, temperature: float, dtype: torch.dtype, device: torch.device
) -> None:
    logits, batch = logits_of(rows, vocabulary, device).to(dtype), batch_of(rows, temperature, device)
    kept = logits.clone()
    result = sample(logits, batch)
    assert_same(result, reference.sample(logits, batch))
    assert_in_its_place(logits, batch, result.token)
    assert (result.token.dtype, result.logprob.dtype) == (torch.int64, torch.float32)
    assert torch.equal(logits, kept)


def test_sampling_over_several_vocabulary_blocks_equals_the_reference(device: torch.device) -> None:
    rows = 24 if INTERPRETING else 300
    logits, batch = logits_of(rows, 2500, device).bfloat16(), batch_of(rows, 0.4, device)
    assert_same(sample(logits, batch), reference.sample(logits, batch))


def test_greedy_rows_beside_sampled_rows_take_the_first_of_equal_logits(device: torch.device) -> None:
    logits = logits_of(24, 2100, device).bfloat16()
    logits[::3, 1500:1503] = logits[::3, 600:601] = 80.0
    batch = batch_of(24, 0.7, device)
    batch = replace(batch, temperature=torch.where(batch.position % 2 == 0, 0.0, batch.temperature))
    result = sample(logits, batch)
    assert (result.token[::6] == 600).all()
    assert_same(result, reference.sample(logits, batch))
    greedy = sample(logits, replace(batch, all_greedy=True))
    assert_same(greedy, reference.sample(logits, replace(batch, all_greedy=True)))


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-3])
def test_a_tiny_temperature_acts_as_greedy(temperature: float, device: torch.device) -> None:
    logits = logits_of(12, 1300, device, spread=1000.0)
    logits[:, ::3] = -INF
    assert torch.equal(sample(logits, batch_of(12, temperature, device)).token, logits.argmax(-1))


def test_a_huge_temperature_samples_every_allowed_token(device: torch.device) -> None:
    logits = logits_of(60, 4, device, spread=50.0)
    logits[:, 2] = -INF
    counts = sample(logits, batch_of(60, 3e38, device)).token.bincount(minlength=4).tolist()
    assert counts.pop(2) == 0
    assert min(counts) > 10


def test_tokens_at_minus_infinity_are_never_sampled(device: torch.device) -> None:
    rows = 16 if INTERPRETING else 40
    logits = torch.full((rows, 4500), -INF, device=device, dtype=torch.bfloat16)
    logits[:, 1030:4000:1000] = 0.0  # few tokens in some vocabulary blocks and none in others
    result = sample(logits, batch_of(rows, 0.5, device))
    assert sorted(set(result.token.tolist())) == [1030, 2030, 3030]
    assert_logprobs(logits, result)


def test_tokens_far_below_the_largest_logit_are_never_sampled(device: torch.device) -> None:
    logits = torch.full((10, 3000), -1e30, device=device)
    logits[:, 2048:] = -200.0
    logits[:, 2999] = 100.0
    result = sample(logits, batch_of(10, 1.0, device))
    assert (result.token == 2999).all()
    assert result.logprob.tolist() == [0.0] * 10


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("content", [-INF, torch.nan, INF])
def test_a_row_of_nan_or_infinity_still_yields_a_valid_token_id(
    content: float, temperature: float, device: torch.device
) -> None:
    logits, batch = logits_of(3, 1300, device), replace(batch_of(3, temperature, device), top_logprobs=2)
    healthy = sample(logits, batch)
    logits[1] = content
    result = sample(logits, batch)
    assert 0 <= int(result.token[1]) < 1300
    assert torch.equal(result.token[::2], healthy.token[::2])
    assert torch.equal(result.top_logprob[::2], healthy.top_logprob[::2])
    assert result.logprob.isfinite().tolist() == [True, False, True]
    if content == -INF:
        assert result.logprob[1].item() == -INF


def test_a_nan_or_infinite_logit_spoils_the_logprob_of_its_row_only(device: torch.device) -> None:
    every, bad = list(edited_batches(12, 1300, device)), rows_of(device, 1, 3, 8, 10)
    good = torch.ones(12, dtype=torch.bool, device=device).index_fill_(0, bad, False)
    for batch in every[3 : 4 if INTERPRETING else 5]:
        logits = logits_of(12, 1300, device)
        healthy = sample(logits, batch)
        logits[bad, rows_of(device, 3, 1024, 1299, 0)] = torch.tensor([torch.nan, INF, torch.nan, INF], device=device)
        result = sample(logits, batch)
        assert torch.equal(result.logprob.isfinite(), good)
        assert torch.equal(reference.sample(logits, batch).logprob.isfinite(), good)
        assert ((result.token >= 0) & (result.token < 1300)).all()
        assert torch.equal(result.token[good], healthy.token[good])
        assert torch.equal(result.logprob[good], healthy.logprob[good])


def test_sampled_tokens_do_not_depend_on_the_rest_of_the_batch(device: torch.device) -> None:
    logits, batch = logits_of(16, 1400, device).bfloat16(), batch_of(16, 0.8, device)
    together = sample(logits, batch)
    for rows in ([3], [15, 0, 7]):
        index = torch.tensor(rows, device=device)
        part = sample(logits[index], part_of(batch, index))
        assert torch.equal(part.token, together.token[index])
        assert torch.equal(part.logprob, together.logprob[index])


def test_sampling_accepts_strided_logits(device: torch.device) -> None:
    wide = logits_of(6, 2100, device)
    batch = batch_of(6, 1.0, device)
    assert_same(sample(wide[:, 30:1500], batch), reference.sample(wide[:, 30:1500], batch))
    repeated = wide[:1].expand(6, -1)
    assert_same(sample(repeated, batch), reference.sample(repeated, batch))
    assert_same(sample(wide[:, :6].T, batch), reference.sample(wide[:, :6].T, batch))


def test_top_logprobs_are_sorted_with_ties_by_lowest_id(device: torch.device) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, -INF]], device=device)
    result = sample(logits, replace(batch_of(1, 0.0, device), top_logprobs=5))
    assert result.top_token.tolist() == [[1, 3, 2, 0, 4]]
    assert_same(result, reference.sample(logits, replace(batch_of(1, 0.0, device), top_logprobs=5)))
    with pytest.raises(ValueError, match="top_logprobs is 6; allowed: 0 to the vocabulary's 5"):
        sample(logits, replace(batch_of(1, 0.0, device), top_logprobs=6))


def test_only_rows_that_request_top_logprobs_get_them(device: torch.device) -> None:
    logits, batch = logits_of(5, 300, device), replace(batch_of(5, 1.0, device), top_logprobs=2)
    for asking in ([3, 0], []):
        some = replace(batch, top_rows=torch.tensor(asking, dtype=torch.int64, device=device))
        assert_same(sample(logits, some), reference.sample(logits, some))


def test_a_step_without_sampling_rows_yields_no_tokens(device: torch.device) -> None:
    index = torch.empty(0, dtype=torch.int64, device=device)
    batch = replace(batch_of(0, 1.0, device), top_logprobs=2, bias=LogitBias(index, index, index.float()))
    result = sample(logits_of(0, 10, device), batch)
    assert (result.token.shape, result.top_token.shape) == ((0,), (0, 2))


# --- rows with edits --------------------------------------------------------------------------------------------


def rows_of(device: torch.device, *rows: int) -> Tensor:
    return torch.tensor(rows, device=device)


def penalties_of(rows: Tensor, vocabulary: int) -> Penalties:
    count, source = len(rows), torch.Generator(rows.device).manual_seed(3)
    held = torch.randint(0, vocabulary, (2, count, vocabulary), generator=source, device=rows.device).tolist()
    step = torch.arange(count, device=rows.device) / count
    return Penalties(rows, contexts_of(held[0], held[1], rows.device), step, 1 - step, 1 + step)


def bias_of(rows: Tensor, vocabulary: int) -> LogitBias:
    """Return three biases a row: two of the same token, and one of -inf."""
    token = torch.stack((rows * 3, rows * 3, rows * 5 + 1), dim=-1) % vocabulary
    value = torch.tensor([4.0, 3.5, -INF], device=rows.device).repeat(len(rows))
    return LogitBias(rows.repeat_interleave(3), token.flatten(), value)


def filters_of(rows: Tensor) -> Filters:
    return Filters(rows, rows.int() % 7 * 9, 1 - rows % 4 / 9, rows % 3 / 20)


def edited_batches(rows: int, vocabulary: int, device: torch.device) -> Iterator[SamplingBatch]:
    batch = batch_of(rows, 0.8, device)
    batch = replace(batch, temperature=torch.where(batch.position % 5 == 0, 0.0, batch.temperature), top_logprobs=2)
    penalties = penalties_of(rows_of(device, 9, 0, 2, 3), vocabulary)
    bias = bias_of(rows_of(device, 3, 4, 8), vocabulary)
    filters = filters_of(rows_of(device, 8, 3, 1, 5, 11))
    yield replace(batch, penalties=penalties)
    yield replace(batch, bias=bias)
    yield replace(batch, filters=filters)
    yield replace(batch, penalties=penalties, bias=bias, filters=filters)
    yield replace(batch, penalties=penalties, bias=bias, filters=filters, all_greedy=True)
    everyone = torch.arange(rows, device=device)
    yield replace(batch, bias=bias_of(everyone, vocabulary), filters=filters_of(everyone[::2]))


@pytest.mark.parametrize(
    ("dtype", "at_a_time"), [(torch.bfloat16, 5)] if INTERPRETING else [(torch.bfloat16, 5), (torch.float32, 1000)]
)
def test_rows_with_penalties_bias_or_filters_equal_the_reference(
    dtype: torch.dtype, at_a_time: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary = 1100
    monkeypatch.setattr(sampling_edits, "_MAX_CHUNK_ENTRIES", at_a_time * vocabulary)
    logits = logits_of(12, vocabulary, device).to(dtype)
    for batch in edited_batches(12, vocabulary, device):
        kept = logits.clone()
        assert_same(sample(logits, batch), reference.sample(logits, batch))
        assert torch.equal(logits, kept)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_bias_forbids_all_tokens_takes_the_largest_raw_logit(
    temperature: float, device: torch.device
) -> None:
    logits, everything = logits_of(4, 300, device), torch.arange(300, device=device)
    bias = LogitBias(torch.full_like(everything, 2), everything, torch.full((300,), -INF, device=device))
    for filters in (None, filters_of(torch.arange(4, device=device))):
        batch = replace(batch_of(4, temperature, device), bias=bias, filters=filters)
        result = sample(logits, batch)
        assert result.token[2] == logits[2].argmax()
        assert_same(result, reference.sample(logits, batch))


# --- frequencies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.5] if INTERPRETING else [1.0, 0.5])
def test_sampled_token_frequencies_match_the_softmax(temperature: float, device: torch.device) -> None:
    rows = 100 if INTERPRETING else 20_000
    logits = torch.full((2050,), -INF, device=device)
    logits[40::90] = logits_of(1, 23, device, spread=1.0)[0]
    batch = batch_of(rows, temperature, device, seed=5)
    found = sample(logits.expand(rows, -1), batch).token.bincount(minlength=2050).cpu().numpy()
    probability = (logits.double() / temperature).softmax(-1).cpu().numpy()
    assert found[probability == 0].sum() == 0
    common = probability * rows >= 5
    rare = (probability > 0) & ~common
    bins = [np.append(x[common], x[rare].sum()) for x in (found, probability * rows)]
    used = bins[1] > 0
    assert stats.chisquare(bins[0][used], bins[1][used]).pvalue > 1e-3


# --- on the device ----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_at_most_one_token_in_ten_thousand_differs_from_the_reference(dtype: torch.dtype) -> None:
    differ, rows = 0, 20_000
    for vocabulary, temperature in ((1000, 1.0), (3000, 0.6), (8191, 1.3)):
        logits, batch = logits_of(rows, vocabulary, CUDA).to(dtype), batch_of(rows, temperature, CUDA)
        result = sample(logits, batch)
        assert_in_its_place(logits, batch, result.token)
        assert_logprobs(logits, result)
        differ += int((result.token != reference.sample(logits, batch).token).sum())
    assert differ <= 6


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "vocabulary"), [(8192, 128_256), (300, 151_936), (5, 262_144), (64, 50_257)])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampling_whole_vocabularies_follows_the_exact_softmax(rows: int, vocabulary: int, temperature: float) -> None:
    logits = torch.empty((rows, vocabulary), dtype=torch.bfloat16, device=CUDA).normal_(std=2.0)
    batch = batch_of(rows, temperature, CUDA)
    result = sample(logits, batch)
    index = torch.randperm(rows)[:256].sort().values.to(CUDA)
    keys = part_of(batch, index)
    assert_in_its_place(logits[index], keys, result.token[index])
    assert torch.equal(sample(logits[index], keys).token, result.token[index])
    assert_logprobs(logits[index], replace(result, token=result.token[index], logprob=result.logprob[index]))
    greedy = sample(logits, replace(batch, all_greedy=True)).token
    assert torch.equal(logits.gather(-1, greedy[:, None])[:, 0], logits.amax(-1))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_sampling_never_synchronizes_with_the_device() -> None:
    logits = logits_of(12, 1100, CUDA)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in edited_batches_ready(12, 1100):
            sample(logits, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def edited_batches_ready(rows: int, vocabulary: int) -> list[SamplingBatch]:
    """Return the edited batches, built and copied to the device while synchronizing is allowed."""
    torch.cuda.set_sync_debug_mode("default")
    batches = list(edited_batches(rows, vocabulary, CUDA))
    torch.cuda.set_sync_debug_mode("error")
    return batches


@pytest.mark.gpu
def test_a_captured_graph_samples_from_updated_buffers() -> None:
    logits, batch = logits_of(40, 5000, CUDA).bfloat16(), batch_of(40, 0.7, CUDA)
    sample(logits, batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sample(logits, batch)
    for seed in (1, 2):
        logits.copy_(logits_of(40, 5000, CUDA, seed=seed))
        batch.position.add_(1000)
        graph.replay()
        assert_same(captured, sample(logits, batch))

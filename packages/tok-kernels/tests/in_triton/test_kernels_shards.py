"""Tests of sampling from a vocabulary sharded over ranks: every rank gets the token of unsharded sampling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.interpreted import INTERPRETING, outside, rerun
from support.shards import draw_together
from tok_kernels import Filters, LogitBias, Sampled, SamplingBatch, choose
from tok_kernels.backends.reference import ReferenceBackend
from tok_kernels.sampling.triton.sampling import sample as triton_sample

reference = ReferenceBackend()

INF = torch.inf
CPU = torch.device("cpu")

# The interpreter's NumPy arrays warn of overflowing exponents and rows of NaN; a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore:.*(overflow|invalid value|All-NaN slice) encountered:RuntimeWarning")


@outside
def test_the_tests_of_this_file_pass_under_the_interpreter() -> None:
    rerun(__file__)


def batch_of(temperature: list[float], device: torch.device, seed: int = 0) -> SamplingBatch:
    count = torch.arange(len(temperature), device=device)
    return SamplingBatch(torch.tensor(temperature, device=device), count * 7919 + seed, count % 5, count)


def logits_of(rows: int, vocabulary: int, device: torch.device, spread: float = 3.0, seed: int = 0) -> Tensor:
    source = torch.Generator().manual_seed(rows * vocabulary + seed)
    return (torch.randn((rows, vocabulary), generator=source) * spread).to(device)


def draw_cut(
    logits: Tensor, batch: SamplingBatch, cuts: list[int], sample: Callable[[Tensor, SamplingBatch], Sampled]
) -> list[Sampled]:
    """Return what each rank samples."""
    return draw_together(logits, cuts, lambda part, shards: sample(part, replace(batch, shards=shards)))


def check(logits: Tensor, batch: SamplingBatch, cuts: list[int], *, triton: bool) -> Sampled:
    """Check that every rank samples as from the whole vocabulary; return the result of rank 0."""
    sample = triton_sample if triton else reference.sample
    whole = sample(logits, batch)
    # The log-softmax of a row of −inf is NaN.
    exact = (
        logits.double()
        .log_softmax(-1)
        .nan_to_num(nan=-INF, neginf=-INF)
        .gather(-1, whole.token.unsqueeze(-1))
        .squeeze(-1)
    )
    results = draw_cut(logits, batch, cuts, sample)
    for result in results:
        assert torch.equal(result.token, whole.token)
        torch.testing.assert_close(result.logprob.double(), exact, rtol=1e-6, atol=1e-5)
        assert torch.equal(result.logprob, results[0].logprob)
        assert (result.token.dtype, result.logprob.dtype) == (torch.int64, torch.float32)
        assert result.top_token.shape == result.top_logprob.shape == (len(logits), 0)
    return results[0]


@outside
@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 6),
    vocabulary=st.integers(4, 700),
    places=st.lists(st.floats(0.01, 0.99), min_size=1, max_size=7),
    temperature=st.sampled_from([0.0, 1e-45, 1e-3, 0.6, 1.0, 1.7, 3e38]),
    spread=st.sampled_from([0.0, 1e-3, 3.0, 200.0]),
    gone=st.integers(0, 3),
    seed=st.integers(0, 2**31),
)
def test_reference_sampling_over_vocabulary_shards_equals_unsharded(
    rows: int, vocabulary: int, places: list[float], temperature: float, spread: float, gone: int, seed: int
) -> None:
    cuts = sorted({max(1, min(vocabulary - 1, int(place * vocabulary))) for place in places})
    logits = logits_of(rows, vocabulary, CPU, spread, seed)
    if gone:
        kept = torch.rand(logits.shape, generator=torch.Generator().manual_seed(seed)) > gone / 4
        kept[:, seed % vocabulary] = True
        logits = logits.masked_fill(~kept, -INF)
    check(logits, batch_of([temperature] * rows, CPU, seed), cuts, triton=False)


@outside
def test_greedy_ties_across_ranks_resolve_to_the_lowest_token_id() -> None:
    logits = torch.tensor([[0.0, 1.0, 7.0, 7.0], [5.0, 5.0, 5.0, 5.0], [-INF, -INF, -INF, -INF], [0.0, 9.0, 1.0, 9.0]])
    for all_greedy in (False, True):
        # With all_greedy the temperatures are ignored.
        batch = replace(batch_of([0.7 if all_greedy else 0.0] * 4, CPU), all_greedy=all_greedy)
        for cuts in ([2], [1, 2, 3], [3]):
            assert check(logits, batch, cuts, triton=False).token.tolist() == [2, 0, 0, 1]


PLACES, CONTENTS = (slice(None), 1200, 2), (torch.nan, INF, -INF)
BAD = list(zip(PLACES, CONTENTS, strict=True) if INTERPRETING else product(PLACES, CONTENTS))


@pytest.mark.parametrize(("place", "content"), BAD)
def test_invalid_rows_get_a_non_finite_logprob_on_every_rank(
    place: int | slice, content: float, device: torch.device
) -> None:
    logits = logits_of(6, 1300, device)
    logits[1::2, place] = content
    bad = content != -INF or place == slice(None)
    batch = batch_of([0.0, 0.0, 0.7, 0.7, 1.0, 1.0], device)
    for sample in (triton_sample, reference.sample):
        for each in (batch, replace(batch, all_greedy=True)):
            results = draw_cut(logits, each, [500, 1100], sample)
            for result in results:
                assert result.logprob.isfinite().tolist() == [True, not bad] * 3
                assert torch.equal(result.token, results[0].token)
                assert ((result.token >= 0) & (result.token < 1300)).all()


@outside
def test_sharded_sampling_of_zero_rows_yields_no_tokens() -> None:
    assert check(torch.zeros((0, 9)), batch_of([], CPU), [4], triton=False).token.shape == (0,)


@outside
def test_sharded_sampling_refuses_filters_bias_and_top_logprobs() -> None:
    rows, one = torch.tensor([0]), torch.ones(1)
    plain = batch_of([1.0], CPU)
    for field, batch in (
        ("filters", replace(plain, filters=Filters(rows, rows.int(), one, one))),
        ("bias", replace(plain, bias=LogitBias(rows, rows, one))),
        ("top_logprobs", replace(plain, top_logprobs=1)),
    ):
        with pytest.raises(ValueError, match=rf"{field} is given; allowed: nothing if the vocabulary"):
            check(torch.zeros((1, 4)), batch, [2], triton=False)


@pytest.mark.parametrize(
    ("cuts", "dtype"), [([1000, 1700, 2100], torch.float32), ([1024], torch.bfloat16), ([40], torch.bfloat16)]
)
def test_triton_sampling_over_vocabulary_shards_equals_unsharded(
    cuts: list[int], dtype: torch.dtype, device: torch.device
) -> None:
    rows = 10 if INTERPRETING else 500
    logits = logits_of(rows, 2500, device).to(dtype)
    logits[::5, 900:2000] = -INF
    logits[1::5, 2200:2203] = logits[1::5, 600:601] = 80.0
    batch = batch_of([(0.0, 0.7, 1.0, 1e-45, 3e38)[row // 2 % 5] for row in range(rows)], device)
    drawn = check(logits, batch, cuts, triton=True)
    check(logits, replace(batch, all_greedy=True), cuts, triton=True)
    expected = reference.sample(logits, batch)
    assert torch.equal(drawn.token, expected.token)
    torch.testing.assert_close(drawn.logprob, expected.logprob, rtol=1e-6, atol=1e-5)


@pytest.mark.gpu
def test_sharded_sampling_of_a_real_vocabulary_equals_unsharded() -> None:
    cuda = torch.device("cuda")
    logits = logits_of(300, 128256, cuda).bfloat16()
    batch = batch_of([0.6, 1.0, 0.0] * 100, cuda)
    check(logits, batch, [64128], triton=True)
    assert choose(cuda).sample(logits[:0], batch_of([], cuda)).token.shape == (0,)

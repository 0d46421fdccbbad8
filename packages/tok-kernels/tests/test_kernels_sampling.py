"""Tests of the reference sampler: tokens, log-probabilities, penalties and filters, but not token frequencies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.contexts import contexts_of
from tok_kernels import Filters, LogitBias, Penalties, Sampled, SamplingBatch, choose, top_values
from tok_kernels.sampling.reference import edits
from tok_kernels.sampling.reference.edits import apply_penalties
from tok_kernels.sampling.reference.inversion import invert_cdf
from tok_kernels.sampling.reference.philox import uniform

INF = torch.inf


def batch_of(
    rows: int,
    device: torch.device,
    temperature: float = 1.0,
    *,
    seed: int = 0,
    penalties: Penalties | None = None,
    bias: LogitBias | None = None,
    filters: Filters | None = None,
    top_logprobs: int = 0,
) -> SamplingBatch:
    """Return a batch whose rows differ in position only."""
    count = torch.arange(rows, device=device)
    return SamplingBatch(
        temperature=torch.full((rows,), temperature, device=device),
        seed=torch.full_like(count, seed),
        sample=torch.zeros_like(count),
        position=count,
        penalties=penalties,
        bias=bias,
        filters=filters,
        top_logprobs=top_logprobs,
    )


def logits_of(rows: int, vocabulary: int, device: torch.device, spread: float = 3.0) -> Tensor:
    source = torch.Generator().manual_seed(rows * vocabulary)
    return (torch.randn((rows, vocabulary), generator=source) * spread).to(device)


def draw(logits: Tensor, batch: SamplingBatch) -> Sampled:
    kept = logits.clone()
    result = choose(logits.device).sample(logits, batch)
    assert torch.equal(kept.view(torch.uint8), logits.view(torch.uint8))  # NaN too
    assert result.token.dtype == torch.int64
    assert result.logprob.dtype == torch.float32
    return result


@pytest.mark.parametrize("all_greedy", [False, True])
def test_temperature_zero_takes_the_largest_logit_with_the_lowest_id(all_greedy: bool, device: torch.device) -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 0.0], [-INF, -3.0, -INF, -3.0], [2.0, 2.0, 2.0, 2.0]], device=device)
    batch = replace(batch_of(3, device, 0.0), all_greedy=all_greedy)
    assert draw(logits, batch).token.tolist() == [1, 1, 0]


def test_greedy_and_sampled_rows_share_a_batch(device: torch.device) -> None:
    logits = logits_of(64, 500, device)
    greedy = torch.arange(64, device=device) % 2 == 0
    batch = batch_of(64, device)
    mixed = draw(logits, replace(batch, temperature=(~greedy).float())).token
    assert torch.equal(mixed, torch.where(greedy, logits.argmax(-1), draw(logits, batch).token))


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-38, 1e-45])
def test_a_tiny_temperature_acts_as_greedy(temperature: float, device: torch.device) -> None:
    logits = logits_of(32, 300, device, spread=1000.0)
    logits[:, ::3] = -INF
    assert torch.equal(draw(logits, batch_of(32, device, temperature)).token, logits.argmax(-1))


def test_a_huge_temperature_samples_every_allowed_token(device: torch.device) -> None:
    logits = logits_of(4000, 20, device, spread=50.0)
    logits[:, 7] = -INF
    counts = draw(logits, batch_of(4000, device, 3e38)).token.bincount(minlength=20).tolist()
    assert counts.pop(7) == 0
    assert min(counts) > 120


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logprobs_ignore_temperature_bias_and_filters(
    dtype: torch.dtype, temperature: float, device: torch.device
) -> None:
    logits = logits_of(16, 1000, device).to(dtype)
    row = torch.arange(16, device=device)
    batch = batch_of(
        16,
        device,
        temperature,
        top_logprobs=5,
        bias=LogitBias(row, row * 3, torch.full((16,), 30.0, device=device)),
        filters=Filters(row, row.int() + 1, row / 20 + 0.1, row / 40),
    )
    result = draw(logits, batch)
    exact = logits.double().log_softmax(-1)
    chosen = exact.gather(-1, result.token[:, None])[:, 0]
    torch.testing.assert_close(result.logprob.double(), chosen, rtol=0, atol=1e-5)
    torch.testing.assert_close(result.top_logprob.double(), exact.topk(5).values, rtol=0, atol=1e-5)
    torch.testing.assert_close(exact.gather(-1, result.top_token), exact.topk(5).values, rtol=0, atol=0)


def test_top_logprobs_are_sorted_with_ties_by_lowest_id(device: torch.device) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, -INF]], device=device)
    result = draw(logits, batch_of(1, device, 0.0, top_logprobs=5))
    assert result.top_token.tolist() == [[1, 3, 2, 0, 4]]
    assert result.top_logprob[0, -1].item() == -INF
    assert result.logprob.tolist() == result.top_logprob[:, 0].tolist()


def test_of_equal_last_values_the_lowest_ids_are_returned(device: torch.device) -> None:
    logits = torch.zeros(300, 5000, device=device)
    logits[:, 4000], logits[:, 20] = 2, 1
    logits[7] = -torch.inf
    for rows in (1, 300):
        value, token = top_values(logits[:rows], 5)
        assert token[0].tolist() == [4000, 20, 0, 1, 2]
        assert value[0].tolist() == [2, 1, 0, 0, 0]
        assert torch.equal(token[-1], token[0])
    assert token[7].tolist() == [0, 1, 2, 3, 4]


def test_only_rows_that_request_top_logprobs_get_them(device: torch.device) -> None:
    logits = logits_of(9, 200, device)
    batch = batch_of(9, device, top_logprobs=3)
    every = draw(logits, batch)
    for asking in ([7, 2], []):
        rows = torch.tensor(asking, dtype=torch.int64, device=device)
        some = draw(logits, replace(batch, top_rows=rows))
        assert torch.equal(some.token, every.token)
        assert torch.equal(some.top_token[rows], every.top_token[rows])
        torch.testing.assert_close(some.top_logprob[rows], every.top_logprob[rows])
        others = torch.ones(9, dtype=torch.bool, device=device).index_fill_(0, rows, False)
        assert some.top_token.shape == some.top_logprob.shape == (9, 3)
        assert not some.top_token[others].any()
        assert not some.top_logprob[others].any()


def test_zero_top_logprobs_are_empty_and_too_many_are_refused(device: torch.device) -> None:
    logits = logits_of(3, 10, device)
    result = draw(logits, batch_of(3, device))
    assert result.top_token.shape == result.top_logprob.shape == (3, 0)
    with pytest.raises(ValueError, match="top_logprobs is 11; allowed: 0 to the vocabulary's 10"):
        draw(logits, batch_of(3, device, top_logprobs=11))


def test_a_step_without_sampling_rows_yields_no_tokens(device: torch.device) -> None:
    assert draw(logits_of(0, 10, device), batch_of(0, device)).token.shape == (0,)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    rows=st.integers(1, 64),
    pick=st.integers(0, 63),
    vocabulary=st.sampled_from([2, 127, 128, 129, 1000]),
    filtered=st.booleans(),
)
def test_sampled_tokens_do_not_depend_on_the_rest_of_the_batch(
    seed: int, rows: int, pick: int, vocabulary: int, filtered: bool, device: torch.device
) -> None:
    logits, row = logits_of(rows, vocabulary, device), torch.arange(rows, device=device)
    filters = Filters(row, row.int() % 9 * 5, 1 - row % 4 / 8, row % 3 / 10) if filtered else None
    batch = batch_of(rows, device, 0.8, seed=seed, filters=filters)
    together = draw(logits, batch).token

    def some(index: Tensor) -> Tensor:
        asked = None
        if filters is not None:
            spot = torch.arange(len(index), device=device)
            asked = Filters(spot, filters.top_k[index], filters.top_p[index], filters.min_p[index])
        part = SamplingBatch(
            batch.temperature[index], batch.seed[index], batch.sample[index], batch.position[index], filters=asked
        )
        return draw(logits[index], part).token

    one = torch.tensor([pick % rows], device=device)
    assert torch.equal(some(one), together[one])
    assert torch.equal(some(row.flip(0)), together.flip(0))


def test_seed_sample_and_position_each_change_the_sampled_token(device: torch.device) -> None:
    logits = torch.zeros((500, 1 << 13), device=device)
    batch = batch_of(500, device)
    base = draw(logits, batch).token
    for other in (
        replace(batch, seed=batch.seed + 1),
        replace(batch, seed=batch.seed + (1 << 40)),
        replace(batch, sample=batch.sample + 1),
        replace(batch, position=batch.position + 1000),
    ):
        assert (draw(logits, other).token == base).sum() < 5


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), vocabulary=st.integers(1, 700), zeros=st.floats(0, 0.99))
def test_invert_cdf_returns_the_token_where_the_cdf_passes_u(
    seed: int, vocabulary: int, zeros: float, device: torch.device
) -> None:
    rng = np.random.default_rng(seed)
    # Sums of whole numbers are exact, so that the answer is known to the last bit.
    weight = rng.integers(1, 1000, (20, vocabulary)) * (rng.random((20, vocabulary)) >= zeros)
    weight[:, rng.integers(vocabulary)] += 1
    total, running = weight.sum(-1), weight.cumsum(-1)
    u = rng.integers(0, total) / total + 0.5 / total
    u[0] = 0.0
    expected = [int(np.searchsorted(r, x * t, side="right")) for r, x, t in zip(running, u, total, strict=True)]
    got = invert_cdf(torch.tensor(weight, dtype=torch.float32, device=device), torch.tensor(u, device=device))
    assert got.tolist() == expected


@pytest.mark.parametrize("u", [0.0, 2.0**-53, 0.5, 1 - 2.0**-53])
@pytest.mark.parametrize("vocabulary", [3, 128, 5000])
def test_invert_cdf_never_returns_a_token_of_probability_zero(u: float, vocabulary: int, device: torch.device) -> None:
    weight = logits_of(500, vocabulary, device).exp()
    weight[torch.rand(weight.shape, generator=torch.Generator().manual_seed(1)).to(device) < 0.7] = 0.0
    weight[torch.arange(500), torch.arange(500) % vocabulary] = 1e-30
    token = invert_cdf(weight, torch.full((500,), u, dtype=torch.float64, device=device))
    assert (weight.gather(-1, token[:, None]) > 0).all()
    ends = (weight > 0).to(torch.uint8)
    if u == 0.0:
        assert torch.equal(token, ends.argmax(-1))


def test_tokens_at_minus_infinity_are_never_sampled(device: torch.device) -> None:
    logits = torch.full((3000, 400), -INF, device=device)
    logits[:, 130::60] = 0.0
    token = draw(logits, batch_of(3000, device)).token.tolist()
    assert sorted(set(token)) == list(range(130, 400, 60))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_bias_forbids_all_tokens_takes_the_largest_raw_logit(
    temperature: float, device: torch.device
) -> None:
    logits = logits_of(4, 300, device)
    everything = torch.arange(300, device=device)
    bias = LogitBias(torch.full_like(everything, 2), everything, torch.full((300,), -INF, device=device))
    row = torch.arange(4, device=device)
    filters = Filters(row, row.int(), row / 8 + 0.1, row / 8)
    result = draw(logits, batch_of(4, device, temperature, bias=bias, filters=filters))
    assert result.token[2] == logits[2].argmax()
    assert result.logprob.isfinite().all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("content", [-INF, torch.nan, INF])
def test_a_row_of_nan_or_infinity_still_yields_a_valid_token_id(
    content: float, temperature: float, device: torch.device
) -> None:
    logits = logits_of(3, 300, device)
    healthy = draw(logits, batch_of(3, device, temperature, top_logprobs=2))
    logits[1] = content
    result = draw(logits, batch_of(3, device, temperature, top_logprobs=2))
    assert 0 <= int(result.token[1]) < 300
    assert torch.equal(result.token[::2], healthy.token[::2])
    assert torch.equal(result.top_logprob[::2], healthy.top_logprob[::2])
    assert result.logprob.isfinite().tolist() == [True, False, True]
    if content == -INF:
        assert result.logprob[1].item() == -INF


def test_penalties_follow_their_formulas_on_requesting_rows_only(device: torch.device) -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0, -1.1, 0.0]], device=device).repeat(5, 1)

    def column(*values: float) -> Tensor:
        return torch.tensor(values, device=device)

    # Rows 0, 2, 3 and 4 have penalties; row 1 has none.
    penalties = Penalties(
        rows=torch.tensor([4, 0, 2, 3], device=device),
        contexts=contexts_of([[0, 0]] * 4, [[1, 2, 1, 1]] * 4, device),
        presence_penalty=column(0.0, 0.5, 0.0, 0.0),
        frequency_penalty=column(0.0, 0.0, 0.25, 0.0),
        repetition_penalty=column(2.0, 1.0, 1.0, 1.0),
    )
    edited = logits.clone()
    apply_penalties(edited, penalties)
    expected = [
        [2.0, 1.4, -1.5, -1.1, 0.0],
        [2.0, 1.9, -1.0, -1.1, 0.0],
        [2.0, 1.15, -1.25, -1.1, 0.0],
        [2.0, 1.9, -1.0, -1.1, 0.0],
        [1.0, 0.95, -2.0, -1.1, 0.0],
    ]
    torch.testing.assert_close(edited, torch.tensor(expected, device=device))
    reduced = logits - torch.tensor([0.3, 0.0, 0.0, 0.0, 0.0], device=device)
    greedy = draw(reduced, batch_of(5, device, 0.0, penalties=penalties))
    assert greedy.token.tolist() == [0, 1, 0, 1, 1]


def test_penalties_computed_in_portions_are_unchanged(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    source = np.random.default_rng(4)
    prompts, generated = ([source.integers(0, 30, n).tolist() for n in source.integers(0, 40, 7)] for _ in range(2))
    presence, frequency, repetition = torch.rand((3, 7), generator=torch.Generator().manual_seed(1)).to(device)
    contexts = contexts_of(prompts, generated, device, more=5)
    penalties = Penalties(torch.arange(7, device=device), contexts, presence, frequency, repetition + 1)
    found = []
    for entries, positions in ((edits._MAX_COUNTED_ENTRIES, edits._MAX_COUNTED_POSITIONS), (2 * 50, 7)):
        monkeypatch.setattr(edits, "_MAX_COUNTED_ENTRIES", entries)
        monkeypatch.setattr(edits, "_MAX_COUNTED_POSITIONS", positions)
        found.append(logits_of(7, 50, device))
        apply_penalties(found[-1], penalties)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], logits_of(7, 50, device))


def test_logit_biases_of_one_token_add_up(device: torch.device) -> None:
    index = torch.tensor([0, 0, 1], device=device)
    token, value = torch.tensor([2, 2, 2], device=device), torch.tensor([0.6, 0.6, 0.6], device=device)
    logits = torch.tensor([[0.0, 1.0, 0.0]], device=device).repeat(2, 1)
    batch = batch_of(2, device, 0.0, bias=LogitBias(index, token, value))
    assert draw(logits, batch).token.tolist() == [2, 1]


def support(logits: list[float], device: torch.device, **asked: float) -> set[int]:
    """Return the set of tokens in 3 000 samples of a row with these filters."""
    row = torch.arange(3000, device=device)
    values = {"top_k": 0.0, "top_p": 1.0, "min_p": 0.0} | asked
    columns = {name: torch.full((3000,), value, device=device) for name, value in values.items()}
    filters = Filters(row, columns["top_k"].int(), columns["top_p"], columns["min_p"])
    table = torch.tensor(logits, device=device).repeat(3000, 1)
    return set(draw(table, batch_of(3000, device, filters=filters)).token.tolist())


def test_top_k_top_p_and_min_p_keep_the_tokens_of_their_definitions(device: torch.device) -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.2, 0.1]).log().tolist()
    assert support(logits, device) == {0, 1, 2, 3, 4}
    assert support(logits, device, top_k=1) == {1}
    assert support(logits, device, top_k=2) == {1, 2, 3}  # ties with the second stay
    assert support(logits, device, top_k=100) == {0, 1, 2, 3, 4}
    assert support(logits, device, top_p=0.3) == {1}
    assert support(logits, device, top_p=0.0) == {1}
    assert support(logits, device, top_p=0.5) == {1, 2}  # the lower id of two equal logits
    assert support(logits, device, top_p=0.7) == {1, 2, 3}
    assert support(logits, device, min_p=0.49) == {1, 2, 3}
    assert support(logits, device, min_p=0.51) == {1}
    assert support(logits, device, min_p=1.0) == {1}
    assert support(logits, device, top_k=2, top_p=0.6) == {1, 2}  # top-p over probabilities 0.5, 0.25 and 0.25
    assert support(logits, device, top_k=3, top_p=0.9, min_p=0.6) == {1}


def test_sampling_from_equal_logits_scales_the_uniform_number(device: torch.device) -> None:
    batch = batch_of(200, device)
    u = uniform(batch.seed, batch.sample, batch.position)
    flat = torch.zeros((200, 1000), device=device)
    assert torch.equal(draw(flat, batch).token, (u * 1000).long())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_reference_sampling_never_synchronizes_with_the_device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = torch.device("cuda")
    logits, row = logits_of(8, 500, device), torch.arange(8, device=device)
    contexts = contexts_of([[7]] * 8, [[9]] * 8, device)
    one = torch.ones(8, device=device)
    batch = batch_of(
        8,
        device,
        top_logprobs=3,
        penalties=Penalties(row, contexts, one, one, one),
        bias=LogitBias(row, row, one),
        filters=Filters(row, row.int(), one / 2, one / 9),
    )
    torch.cuda.set_sync_debug_mode("error")
    try:
        choose(device).sample(logits, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")

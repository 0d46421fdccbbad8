"""Tests of the tokens that filters keep, of the distribution of resampled tokens, and of masks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from tok_kernels import Exchange, Filters, Masks, SamplingBatch, choose
from tok_kernels.sampling.reference.filters import kept_mask
from tok_kernels.sampling.reference.philox import uniforms

INF = np.inf


def filters_of(rows: int, top_k: int, top_p: float, min_p: float, device: torch.device) -> Filters:
    """Return the same filters for all rows."""
    every = torch.arange(rows, device=device)
    return Filters(every, (every * 0 + top_k).int(), every * 0 + top_p, every * 0 + min_p)


def batch_of(rows: int, device: torch.device, filters: Filters | None = None) -> SamplingBatch:
    count = torch.arange(rows, device=device)
    fixed = torch.full_like(count, 99)
    return SamplingBatch(torch.ones(rows, device=device), fixed, fixed, count, filters=filters)


def kept_by_definition(logits: np.ndarray, heat: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Return which tokens the filters keep, decided one by one in descending order, ties by lowest id."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    weight = np.exp((logits - logits.max()) / heat)
    left = [t for t in order if top_k == 0 or (logits > logits[t]).sum() < top_k]
    mass, before = weight[left].sum(), 0.0
    nucleus: list[int] = []
    for token in left:
        if top_p < 1 and nucleus and before >= top_p * mass:
            break
        nucleus.append(token)
        before += weight[token]
    return np.isin(np.arange(len(logits)), [t for t in nucleus if weight[t] >= min_p])


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    heat=st.sampled_from([0.5, 1.0, 3.0]),
    distinct=st.sampled_from([2, 5, 1000]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([0.0, 0.303, 0.811, 1.0]),
    min_p=st.sampled_from([0.0, 0.0511, 0.403, 1.0]),
)
def test_filters_keep_the_tokens_of_their_definitions(
    seed: int, heat: float, distinct: int, top_k: int, top_p: float, min_p: float
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.choice(rng.standard_normal(distinct) * 2, 10).astype(np.float32)
    filters = filters_of(1, top_k, top_p, min_p, torch.device("cpu"))
    found = kept_mask(torch.tensor(logits)[None], torch.tensor([heat]), filters)[0].numpy()
    assert found.tolist() == kept_by_definition(logits.astype(float), heat, top_k, top_p, min_p).tolist()


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(5, 1.0, 0.0), (0, 0.6, 0.0), (0, 1.0, 0.3), (9, 0.7, 0.2)])
def test_only_filtered_out_tokens_are_resampled_from_the_kept_ones(
    top_k: int, top_p: float, min_p: float, device: torch.device
) -> None:
    rows, source = 20_000, np.random.default_rng(top_k)
    logits = source.standard_normal(32).astype(np.float32) * 1.5
    table = torch.tensor(logits, device=device).expand(rows, -1)
    batch = batch_of(rows, device)
    plain = choose(device).sample(table, batch).token.cpu().numpy()
    filters = filters_of(rows, top_k, top_p, min_p, device)
    token = choose(device).sample(table, replace(batch, filters=filters)).token.cpu().numpy()
    keeps = kept_by_definition(logits.astype(float), 1.0, top_k, top_p, min_p)
    stays = keeps[plain]
    assert 0.2 < stays.mean() < 0.95
    assert (token[stays] == plain[stays]).all()
    # Resampled tokens follow the filtered distribution, biased neither by the first uniform number nor by the token
    # that was removed.
    expected = special.softmax(np.where(keeps, logits.astype(float), -INF))[keeps]
    first_half = plain < np.median(plain[~stays])
    for part in (~stays, ~stays & first_half, ~stays & ~first_half):
        found = np.bincount(token[part], minlength=32)
        assert found[~keeps].sum() == 0
        assert stats.chisquare(found[keeps], expected * part.sum()).pvalue > 1e-4
    running = special.softmax(np.where(keeps, logits.astype(float), -INF)).cumsum()
    second = uniforms(batch.seed, batch.sample, batch.position)[1].cpu().numpy()
    clear = np.abs(running[:, None] - second[~stays]).min(0) > 1e-5
    at_second = np.searchsorted(running, second[~stays], side="right")
    assert (token[~stays][clear] == at_second[clear]).all()


def test_filters_that_remove_nothing_change_nothing(device: torch.device) -> None:
    logits = torch.randn((200, 700), generator=torch.Generator().manual_seed(1)).to(device)
    batch = batch_of(200, device)
    plain = choose(device).sample(logits, batch)
    for top_k, top_p in ((0, 1.0), (700, 1.0), (10**6, 1.0), (0, 1.5)):
        filtered = choose(device).sample(logits, replace(batch, filters=filters_of(200, top_k, top_p, 0.0, device)))
        assert torch.equal(filtered.token, plain.token)


# --- masks ------------------------------------------------------------------------------------------------------


def masks_of(device: torch.device, allowed: np.ndarray, rows: list[int], which: list[int]) -> Masks:
    """Return the masks that allow `allowed`, bool `[u, V]`."""
    padded = np.pad(allowed, ((0, 0), (0, -allowed.shape[1] % 32)))
    words = np.packbits(padded, axis=1, bitorder="little").view(np.int32)
    return Masks(*(torch.tensor(x, device=device) for x in (rows, which, words)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [31, 32, 33, 8200])
def test_masks_set_forbidden_tokens_of_their_rows_to_minus_infinity(
    vocabulary: int, dtype: torch.dtype, device: torch.device
) -> None:
    rng = np.random.default_rng(vocabulary)
    allowed = rng.random((4, vocabulary)) < np.array([[0.5], [1.0], [0.001], [0.0]])
    allowed[:, [3, vocabulary - 1]] = True
    rows, which = [0, 2, 3, 5, 69, *range(70, 150)], [3, 0, 2, 1, 0] + [0] * 80
    logits = torch.randn((150, vocabulary), generator=torch.Generator().manual_seed(5)).to(device, dtype)
    expected = logits.clone()
    for row, mask in zip(rows, which, strict=True):
        expected[row, torch.tensor(~allowed[mask], device=device)] = -INF
    batch = batch_of(150, device)
    result = choose(device).sample(logits, replace(batch, masks=masks_of(device, allowed, rows, which)))
    assert torch.equal(logits, expected)
    alone = choose(device).sample(expected, batch)
    assert torch.equal(result.token, alone.token)
    torch.testing.assert_close(result.logprob, alone.logprob)
    assert result.logprob.isfinite().all()


class Whole:
    """Shards of a single rank, which holds the whole vocabulary."""

    rank, ranks, first = 0, 1, 0
    exchange: Exchange | None = None

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(0)


def test_masks_over_a_sharded_vocabulary_are_refused() -> None:
    device = torch.device("cpu")
    with pytest.raises(ValueError, match="masks is given; allowed: nothing if the vocabulary is sharded"):
        replace(batch_of(1, device), masks=masks_of(device, np.ones((1, 5), bool), [0], [0]), shards=Whole())

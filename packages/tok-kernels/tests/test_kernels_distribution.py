"""Chi-square tests of sampled token frequencies, for temperature, filters, bias and penalties."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import special, stats
from torch import Tensor

from support.contexts import contexts_of
from tok_kernels import Filters, LogitBias, Penalties, SamplingBatch, choose

ROWS, VOCABULARY = 20_000, 64
LOGITS = np.random.default_rng(7).standard_normal(VOCABULARY) * 2
COLUMNS = ("slots", "length", "prompt_len")
SEEN = np.random.default_rng(8).integers(0, 4, VOCABULARY)  # how often each token was generated


def check(
    probability: np.ndarray,
    device: torch.device,
    temperature: float = 1.0,
    *,
    penalties: Penalties | None = None,
    bias: LogitBias | None = None,
    filters: Filters | None = None,
) -> None:
    """Sample 20 000 rows that differ in position only, and check their frequencies against `probability`, `[V]`."""
    count = torch.arange(ROWS, device=device)
    fixed = torch.full_like(count, 1234)
    heat = torch.full((ROWS,), temperature, device=device)
    batch = SamplingBatch(heat, fixed, fixed, count, penalties, bias, filters)
    logits = torch.tensor(LOGITS, dtype=torch.float32, device=device).expand(ROWS, -1)
    found = choose(device).sample(logits, batch).token.bincount(minlength=VOCABULARY).cpu().numpy()
    assert found[probability == 0].sum() == 0
    expected = probability * ROWS
    rare = (expected < 5) & (probability > 0)  # merged into one bin, since a chi-square test needs 5 a bin
    bins = [np.append(x[expected >= 5], x[rare].sum()) for x in (found, expected)]
    used = bins[1] > 0
    if used.sum() > 1:
        assert stats.chisquare(bins[0][used], bins[1][used]).pvalue > 1e-4
    else:
        assert bins[0][used].sum() == ROWS


def same_filters(device: torch.device, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Filters:
    def column(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((ROWS,), value, dtype=dtype, device=device)

    return Filters(torch.arange(ROWS, device=device), column(top_k, torch.int32), column(top_p), column(min_p))


def only(probability: np.ndarray, kept: np.ndarray) -> np.ndarray:
    cut = np.where(kept, probability, 0.0)
    result: np.ndarray = cut / cut.sum()
    return result


def nucleus(probability: np.ndarray, top_p: float) -> np.ndarray:
    order = np.argsort(-probability)
    size = int(np.searchsorted(probability[order].cumsum(), top_p)) + 1
    return np.isin(np.arange(VOCABULARY), order[:size])


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_sampling_with_temperature_matches_its_distribution(temperature: float, device: torch.device) -> None:
    check(special.softmax(LOGITS / temperature), device, temperature)


@pytest.mark.parametrize("top_k", [1, 2, 17, 63])
def test_sampling_with_top_k_matches_its_distribution(top_k: int, device: torch.device) -> None:
    probability = special.softmax(LOGITS / 1.5)
    kept = np.sort(LOGITS)[-top_k] <= LOGITS
    check(only(probability, kept), device, 1.5, filters=same_filters(device, top_k=top_k))


@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.999])
def test_sampling_with_top_p_matches_its_distribution(top_p: float, device: torch.device) -> None:
    probability = special.softmax(LOGITS / 1.5)
    check(only(probability, nucleus(probability, top_p)), device, 1.5, filters=same_filters(device, top_p=top_p))


@pytest.mark.parametrize("min_p", [0.02, 0.3, 1.0])
def test_sampling_with_min_p_matches_its_distribution(min_p: float, device: torch.device) -> None:
    probability = special.softmax(LOGITS / 0.8)
    kept = probability >= min_p * probability.max()
    check(only(probability, kept), device, 0.8, filters=same_filters(device, min_p=min_p))


def test_sampling_with_all_filters_matches_its_distribution(device: torch.device) -> None:
    probability = special.softmax(LOGITS / 2)
    probability = only(probability, np.sort(LOGITS)[-30] <= LOGITS)
    probability = only(probability, nucleus(probability, 0.8))
    probability = only(probability, probability >= 0.2 * probability.max())
    assert 3 < (probability > 0).sum() < 30
    check(probability, device, 2.0, filters=same_filters(device, top_k=30, top_p=0.8, min_p=0.2))


def test_sampling_with_logit_bias_matches_its_distribution(device: torch.device) -> None:
    token, value = [3, 50, 9], [2.5, -1.0, -math.inf]
    row = torch.arange(ROWS, device=device)
    bias = LogitBias(
        row=row.repeat_interleave(3),
        token=torch.tensor(token, device=device).repeat(ROWS),
        value=torch.tensor(value, device=device).repeat(ROWS),
    )
    edited = LOGITS.copy()
    edited[token] += value
    check(special.softmax(edited), device, bias=bias)


@pytest.mark.parametrize(
    ("presence", "frequency", "repetition"), [(1.2, 0.0, 1.0), (0.0, 0.7, 1.0), (0.0, 0.0, 1.5), (-0.5, 0.3, 0.8)]
)
def test_sampling_with_penalties_matches_its_distribution(
    presence: float, frequency: float, repetition: float, device: torch.device
) -> None:
    in_prompt = np.arange(VOCABULARY) % 5 == 0
    generated = np.arange(VOCABULARY).repeat(SEEN)
    contexts = contexts_of([np.flatnonzero(in_prompt).tolist()], [generated.tolist()], device)

    def column(value: float) -> Tensor:
        return torch.full((ROWS,), value, device=device)

    penalties = Penalties(
        rows=torch.arange(ROWS, device=device),
        contexts=replace(contexts, **{name: getattr(contexts, name).expand(ROWS) for name in COLUMNS}),
        presence_penalty=column(presence),
        frequency_penalty=column(frequency),
        repetition_penalty=column(repetition),
    )
    edited = np.where(LOGITS > 0, LOGITS / repetition, LOGITS * repetition)
    edited = np.where(in_prompt | (SEEN > 0), edited, LOGITS)
    edited = edited - frequency * SEEN - presence * (SEEN > 0)
    check(special.softmax(edited / 1.3), device, 1.3, penalties=penalties)

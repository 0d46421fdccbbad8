"""Tests of Triton filters and masks against the reference, on every code path that a row can take."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from support.interpreted import INTERPRETING, outside, rerun
from tok_kernels import Filters, Masks, SamplingBatch
from tok_kernels.backends.reference import ReferenceBackend
from tok_kernels.sampling.reference.edits import apply_masks as apply_masks_by_reference
from tok_kernels.sampling.triton import filters as triton_filters
from tok_kernels.sampling.triton.block_sampling import RandomKeys, sample_blocks
from tok_kernels.sampling.triton.filter_check import check_filters_kernel
from tok_kernels.sampling.triton.filters import filter_verdicts
from tok_kernels.sampling.triton.masks import apply_masks
from tok_kernels.sampling.triton.resample import resample_kernel
from tok_kernels.sampling.triton.sampling import sample

reference = ReferenceBackend()

INF = torch.inf
CUDA = torch.device("cuda")
KEPT, ABOVE, LIKELY, OPEN = range(4)

pytestmark = pytest.mark.filterwarnings("ignore:.*(overflow|invalid value|All-NaN slice) encountered:RuntimeWarning")


@outside
def test_the_tests_of_this_file_pass_under_the_interpreter() -> None:
    rerun(__file__)


def batch_of(filters: Filters, temperature: float = 1.0, seed: int = 0) -> SamplingBatch:
    """Return a batch in which every row has filters."""
    count = filters.rows
    temperature_R = torch.full((len(count),), temperature, device=count.device)
    return SamplingBatch(temperature_R, count * 7919 + seed, count % 5, count.clone(), filters=filters)


def filters_of(rows: int, device: torch.device, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Filters:
    every = torch.arange(rows, device=device)
    return Filters(every, (every * 0 + top_k).int(), every * 0.0 + top_p, every * 0.0 + min_p)


def logits_of(rows: int, vocabulary: int, device: torch.device, spread: float = 2.0) -> Tensor:
    source = torch.Generator(device).manual_seed(rows * vocabulary)
    return torch.randn((rows, vocabulary), generator=source, device=device) * spread + 3


WAYS = [(3, 1.0, 0.0), (40, 1.0, 0.0), (0, 0.6, 0.0), (0, 1.0, 0.3), (30, 0.7, 0.0), (30, 0.95, 0.2)]


@pytest.mark.parametrize(
    ("dtype", "few"),
    [(torch.bfloat16, 2048), (torch.float32, 0)]
    if INTERPRETING
    else [(torch.float32, 2048), (torch.float32, 0), (torch.bfloat16, 2048), (torch.float16, 0)],
)
def test_every_filter_code_path_samples_the_token_of_the_reference(
    dtype: torch.dtype, few: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_filters, "MAX_COLLECTED_ENTRIES", few)
    rows = 18 if INTERPRETING else 600
    logits = logits_of(rows, 2100, device, spread=1.6).to(dtype)
    every = torch.arange(rows, device=device)
    top_k, top_p, min_p = (torch.tensor(x, device=device)[every % len(WAYS)] for x in zip(*WAYS, strict=True))
    batch = batch_of(Filters(every, top_k.int(), top_p, min_p), 0.7)
    assert batch.filters is not None
    keys = RandomKeys.from_batch(batch)
    verdict, _ = filter_verdicts(logits, sample_blocks(logits, keys), keys, batch.filters)
    assert set(verdict.tolist()) == {KEPT, ABOVE, LIKELY, OPEN}
    assert torch.equal(sample(logits, batch).token, reference.sample(logits, batch).token)


def test_top_p_keeps_lower_ids_among_equal_logits_at_the_threshold(device: torch.device) -> None:
    """The 1 024 largest entries hold half of the mass, so that top-p 0.6 keeps 400 of the 2 000 equal ones."""
    rows = 4 if INTERPRETING else 2000
    logits = torch.full((rows, 3100), -INF, device=device)
    logits[:, :1024] = 1.0
    logits[:, 1050:3050] = torch.tensor(1024 / 2000, device=device).log() + 1
    for top_k in (0, 1024):
        batch = batch_of(filters_of(rows, device, top_k, top_p=0.6))
        token = sample(logits, batch).token
        assert torch.equal(token, reference.sample(logits, batch).token)
        assert int(token.max()) < (1024 if top_k == 1024 else 1050 + 400)
    alone = batch_of(filters_of(rows, device, top_p=0.75))
    some = torch.tensor([rows - 1, 3], device=device)
    part = SamplingBatch(alone.temperature[some], alone.seed[some], alone.sample[some], alone.position[some])
    part = replace(part, filters=filters_of(2, device, top_p=0.75))
    assert torch.equal(sample(logits[some], part).token, sample(logits, alone).token[some])


@pytest.mark.parametrize("content", ["masked", "around zero", "far apart", "greedy", "hot", "none"])
def test_filters_on_extreme_logits_sample_the_token_of_the_reference(content: str, device: torch.device) -> None:
    rows = 6 if INTERPRETING else 300
    logits, temperature = logits_of(rows, 1500, device), 1.0
    match content:
        case "masked":
            logits[:, torch.arange(1500, device=device) % 50 != 7] = -INF
        case "around zero":
            logits = ((logits - 3) * 1e-6).bfloat16()
            logits[:, ::3], logits[:, 1::3] = 0.0, -0.0
        case "far apart":
            logits *= 1e30
        case "greedy":
            temperature = 0.0
        case "hot":
            temperature = 3e38
        case "none":
            logits[::2] = -INF
    every = torch.arange(rows, device=device)
    filters = Filters(every, (every % 4 * 11).int(), 1 - every % 3 / 3, every % 5 / 9)
    batch = batch_of(filters, temperature)
    result = sample(logits, batch)
    if content == "none":
        assert ((result.token >= 0) & (result.token < 1500)).all()
        result, logits = replace(result, token=result.token[1::2]), logits[1::2]
        fewer = Filters(every[: rows // 2], *(x[1::2] for x in (filters.top_k, filters.top_p, filters.min_p)))
        batch = SamplingBatch(
            batch.temperature[1::2], batch.seed[1::2], batch.sample[1::2], batch.position[1::2], filters=fewer
        )
    assert torch.equal(result.token, reference.sample(logits, batch).token)


@pytest.mark.parametrize("content", [torch.nan, INF])
def test_filtered_rows_with_nan_or_infinity_do_not_affect_other_rows(content: float, device: torch.device) -> None:
    logits = logits_of(6, 1300, device)
    batch = batch_of(filters_of(6, device, top_k=9, top_p=0.5, min_p=0.1))
    healthy = sample(logits, batch)
    logits[1], logits[3, 5], logits[5, 1290] = content, content, -content
    token = sample(logits, batch).token
    assert ((token >= 0) & (token < 1300)).all()
    assert torch.equal(token[:3:2], healthy.token[:3:2])


# --- masks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [31, 64, 4100, 8191])
def test_masks_forbid_the_same_tokens_as_the_reference(
    vocabulary: int, dtype: torch.dtype, device: torch.device
) -> None:
    source = torch.Generator(device).manual_seed(vocabulary)
    width = -(-vocabulary // 32)
    words = torch.randint(-(2**31), 2**31, (4, width), generator=source, device=device, dtype=torch.int32)
    words[1], words[2], words[3, : width // 2] = 0, -1, 0
    rows, which = torch.tensor([0, 2, 3, 5], device=device), torch.tensor([3, 1, 0, 2], device=device)
    logits = logits_of(7, vocabulary + 9, device).to(dtype)[:, 4:-5]  # a view: the columns beside it must not change
    expected = logits.clone()
    around = logits._base
    assert around is not None
    beside = around.clone()
    beside[:, 4:-5] = 0
    apply_masks(logits, Masks(rows, which, words))
    apply_masks_by_reference(expected, Masks(rows, which, words))
    assert torch.equal(logits, expected)
    around[:, 4:-5] = 0
    assert torch.equal(around, beside)


# --- on the device ----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("spread", [1.0, 4.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_filters_over_whole_vocabularies_hardly_differ_from_the_reference(dtype: torch.dtype, spread: float) -> None:
    rows = 2000
    logits = logits_of(rows, 128_256, CUDA, spread).to(dtype)
    every = torch.arange(rows, device=CUDA)
    filters = Filters(every, (every % 3 * (every % 97)).int(), 1 - every % 4 / 9, every % 5 / 20)
    batch = batch_of(filters, 0.8)
    assert int((sample(logits, batch).token != reference.sample(logits, batch).token).sum()) <= 4


@pytest.mark.gpu
def test_a_captured_graph_filters_updated_buffers() -> None:
    logits = logits_of(40, 5000, CUDA).bfloat16()
    batch = batch_of(filters_of(40, CUDA, top_k=50, top_p=0.8, min_p=0.01))
    sample(logits, batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sample(logits, batch)
    for step in (1, 2):
        logits.normal_(std=2.0 + step)
        batch.position.add_(1000)
        graph.replay()
        fresh = sample(logits, batch)
        assert torch.equal(captured.token, fresh.token)
        torch.testing.assert_close(captured.logprob, fresh.logprob)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_filters_and_masks_neither_synchronize_nor_recompile() -> None:
    words = torch.full((3, 40), 0x0F0F0F0F, dtype=torch.int32, device=CUDA)
    cases = []
    for rows in (8, 7, 64, 33):
        filters = filters_of(rows, CUDA, top_k=5, top_p=0.5)
        masks = Masks(filters.rows, filters.rows % 3, words)
        cases.append((logits_of(rows, 1280, CUDA).bfloat16(), replace(batch_of(filters), masks=masks)))
    sample(*cases[0])
    compiled = [_variants(kernel) for kernel in (check_filters_kernel, resample_kernel)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for logits, batch in cases:
            sample(logits, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [_variants(kernel) for kernel in (check_filters_kernel, resample_kernel)] == compiled


def _variants(kernel: object) -> int:
    """Return how many times the kernel has been compiled."""
    caches: dict[int, tuple[dict[str, object], ...]] = kernel.device_caches  # type: ignore[attr-defined]
    return sum(len(cache[0]) for cache in caches.values())

"""TP calibration chooses the layout for each step size from measured times."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tok_core.parallel.tensor import TensorParallel
from tok_core.parallel.tp_layouts import AllReduceLayout, OverlappedLayout, SequenceParallelLayout, choose_layout
from tok_core.worker.startup.tp_calibration import NO_OVERLAP_TOKENS, choose_thresholds, crossover

SIZES = (16, 32, 64, 128, 256)


@pytest.mark.parametrize(
    ("all_reduce", "sequence_parallel", "overlapped", "all_reduce_tokens", "overlap_from"),
    [
        ((1, 2, 3, 9, 20), (2, 3, 4, 5, 9), (9, 9, 9, 9, 9), 64, NO_OVERLAP_TOKENS),
        ((1, 2, 3, 9, 20), (2, 3, 4, 5, 9), (9, 9, 9, 4, 8), 64, 128),
        ((9, 9, 9, 9, 9), (1, 1, 1, 1, 1), (0, 0, 0, 0, 0), 0, 16),
        # The overlapped layout has to be ahead of the faster one of the others.
        ((2, 2, 2, 2, 2), (3, 3, 3, 3, 3), (9, 9, 9, 1, 1), 256, 128),
        ((2, 2, 2, 2, 2), (4, 4, 4, 4, 4), (3, 3, 3, 3, 3), 256, NO_OVERLAP_TOKENS),
        ((4, 4, 4, 4, 4), (2, 2, 2, 2, 2), (3, 3, 3, 3, 3), 0, NO_OVERLAP_TOKENS),
        # A single size with another order is no threshold, nor is a gain within rounding.
        ((1, 9, 1, 1, 1), (2, 2, 2, 2, 2), (0, 0, 9, 0, 0), 16, 128),
        ((1, 2, 3, 9, 20), (2, 3, 4, 5, 9), (9, 9, 9, 4, 8.95), 64, NO_OVERLAP_TOKENS),
    ],
)
def test_layout_thresholds_hold_for_all_larger_sizes(
    all_reduce: tuple[float, ...],
    sequence_parallel: tuple[float, ...],
    overlapped: tuple[float, ...],
    all_reduce_tokens: int,
    overlap_from: int,
) -> None:
    assert choose_thresholds(SIZES, all_reduce, sequence_parallel, overlapped) == (all_reduce_tokens, overlap_from)


def test_crossover_is_the_last_size_before_the_first_slower_one() -> None:
    assert crossover(SIZES, (1, 2, 9, 1, 1), (2, 2, 2, 2, 2)) == 32
    assert crossover(SIZES, (3, 1, 1, 1, 1), (2, 2, 2, 2, 2)) == 0


@pytest.fixture
def tensor(monkeypatch: pytest.MonkeyPatch) -> Iterator[TensorParallel]:
    """Yield the tensor parallelism of one process that counts two ranks when it splits tokens."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        tensor = TensorParallel(dist.group.WORLD, torch.device("cpu"))  # type: ignore[arg-type]
        tensor.ranks = 2
        yield tensor
    finally:
        dist.destroy_process_group()


def test_overlapped_layout_is_chosen_from_its_threshold_on(tensor: TensorParallel) -> None:
    tensor.max_all_reduce_tokens, tensor.min_overlap_tokens = 100, 40
    assert [type(choose_layout(tensor, tokens)) for tokens in (1, 39, 40, 41, 101)] == [AllReduceLayout] * 2 + [
        OverlappedLayout
    ] * 3
    assert [tensor.rows(tokens) for tokens in (1, 39, 40, 41, 101)] == [1, 39, 20, 21, 51]
    tensor.min_overlap_tokens = None
    assert [type(choose_layout(tensor, tokens)) for tokens in (100, 101, 999)] == [
        AllReduceLayout,
        SequenceParallelLayout,
        SequenceParallelLayout,
    ]
    assert [tensor.rows(tokens) for tokens in (100, 101, 999)] == [100, 51, 500]


def test_cpu_tensors_are_summed_by_collectives(tensor: TensorParallel) -> None:
    x = torch.ones((1, 8))
    assert not tensor.exchanges(x)
    assert torch.equal(tensor.sum(x), torch.ones((1, 8)))
    assert torch.equal(tensor.sum(torch.zeros((0, 8))), torch.zeros((0, 8)))

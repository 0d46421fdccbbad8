"""Set the thresholds between all-reduces, and between tensor-parallel layouts, by timing both sides at each size.

An all-reduce of few bytes runs in a kernel of ours (one-shot all-reduce, `exchange`), a larger one in NCCL. A step of
few tokens uses the layout with all-reduces, a larger one sequence parallelism, and the largest ones overlap GEMMs with
collectives.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from tok_core.config import RankCoordinates
from tok_core.errors import InvalidField
from tok_core.models import CausalLM, DecoderLayer
from tok_core.parallel import (
    AllReduceLayout,
    OverlappedLayout,
    ProcessGroups,
    SequenceParallelLayout,
    TensorParallel,
    TPLayout,
)
from tok_kernels.collectives.exchange import MAX_ALL_REDUCE_BYTES

log = logging.getLogger("tok_core")

RUNS = 5  # timed runs; the fastest counts
ITERATIONS = 4  # iterations per run, so that the host can launch ahead of the device
NO_OVERLAP_TOKENS = 1 << 62  # stands for None where workers agree on an integer
MAX_OVERLAP_RATIO = 0.98  # of overlapped time to other layouts' time: overlapping costs host time, too
MAX_CAPTURED_TOKENS = 256  # steps up to this size are timed as CUDA graphs, which run most of them; none overlaps


def calibrate_tensor_parallel(
    model: CausalLM, peers: ProcessGroups, max_tokens: int, async_tp_threshold: int | None
) -> None:
    """Set the thresholds of the model's TensorParallel, equal on all workers of the replica.

    max_tokens          maximum tokens of a step
    async_tp_threshold  smallest step, in tokens, that overlaps GEMMs with collectives; 0: none; None: measure it

    All workers call this at the same point. On CPUs, and without tensor parallelism, nothing changes. With
    `ordered` sums, every step all-reduces. Worker 0's times decide: a collective ends at the same time everywhere.
    Raises InvalidField if `async_tp_threshold` requests overlap and the devices do not support it.
    """
    tensor = model.tensor
    if tensor is None:
        return
    # The minimum is that of all pipeline stages. This also waits until the last worker has its weights.
    symmetric = bool(peers.all_reduce_min(tensor.symmetric))
    if async_tp_threshold and not symmetric:
        raise InvalidField(
            "async_tp_threshold", async_tp_threshold, "0 (these devices cannot read each other's memory)"
        )
    if tensor.ordered:
        tensor.max_all_reduce_tokens = max_tokens
        return
    if tensor.device.type != "cuda":
        return
    if async_tp_threshold != 0 and symmetric:
        tensor.reserve(max_tokens, model.config.hidden_size, model.dtype)
    tensor.max_exchange_bytes = peers.broadcast_from_first(_measure_max_exchange_bytes(tensor))
    timings = _time_layouts(model, max_tokens, may_overlap=symmetric and async_tp_threshold is None)
    if peers.coordinates.number == 0:
        log.debug("%s", format_times(*timings))
    all_reduce_tokens, overlap_tokens = map(peers.broadcast_from_first, choose_thresholds(*timings))
    overlap_tokens = async_tp_threshold or overlap_tokens
    tensor.max_all_reduce_tokens = all_reduce_tokens
    tensor.min_overlap_tokens = None if overlap_tokens == NO_OVERLAP_TOKENS else overlap_tokens


def log_thresholds(model: CausalLM, coordinates: RankCoordinates) -> None:
    """Log the thresholds between layouts, on worker 0."""
    tensor = model.tensor
    if tensor is None or coordinates.number:
        return
    overlap = "never" if tensor.min_overlap_tokens is None else f"from {tensor.min_overlap_tokens} tokens on"
    log.info(
        "tp %d: all-reduce up to %d tokens a step, then sequence parallelism; GEMMs overlap with collectives %s",
        *(tensor.ranks, tensor.max_all_reduce_tokens, overlap),
    )


def _measure_max_exchange_bytes(tensor: TensorParallel) -> int:
    """Return the bytes up to which the one-shot all-reduce (`exchange`) is faster than NCCL's; 0 without it."""
    if tensor.exchange is None:
        return 0
    sizes = [1 << bit for bit in range(12, 40) if 1 << bit <= MAX_ALL_REDUCE_BYTES]
    one_shot = [_all_reduce_seconds(tensor, size, MAX_ALL_REDUCE_BYTES) for size in sizes]
    nccl = [_all_reduce_seconds(tensor, size, 0) for size in sizes]
    return crossover(sizes, one_shot, nccl)


def _all_reduce_seconds(tensor: TensorParallel, size: int, max_exchange_bytes: int) -> float:
    """Return the time of an all-reduce of `size` bytes, one-shot if `size` is at most `max_exchange_bytes`."""
    tensor.max_exchange_bytes = max_exchange_bytes
    x = torch.zeros(size // 2, dtype=torch.bfloat16, device=tensor.device)
    return _seconds(lambda: tensor.sum(x), tensor.device, captured=True)


class LayoutTimings(NamedTuple):
    """Seconds per layer in each layout, at ascending token counts `sizes`; inf: not measured."""

    sizes: list[int]
    all_reduce: list[float]
    sequence_parallel: list[float]
    overlapped: list[float]


def _time_layouts(model: CausalLM, max_tokens: int, *, may_overlap: bool) -> LayoutTimings:
    """Time one layer at all sizes in all layouts.

    No measurement depends on earlier times: they differ between ranks, and ranks must launch the same collectives.
    """
    sizes = _sizes(max_tokens)
    sequence_parallel = [layer_seconds(model, SequenceParallelLayout, tokens) for tokens in sizes]
    all_reduce = [layer_seconds(model, AllReduceLayout, tokens) for tokens in sizes]
    overlapped = [
        layer_seconds(model, OverlappedLayout, tokens) if may_overlap and tokens > MAX_CAPTURED_TOKENS else math.inf
        for tokens in sizes
    ]
    return LayoutTimings(sizes, all_reduce, sequence_parallel, overlapped)


def format_times(sizes: Sequence[int], *layouts: Sequence[float]) -> str:
    """Format timings as one line: for each size, milliseconds of all-reduce, sequence-parallel and overlapped layout.

    >>> format_times([256, 512], [1e-3, 2e-3], [2e-3, 1.5e-3], [math.inf, 1e-3])
    'ms per layer, all-reduce/sequence-parallel/overlapped: 256 tokens 1.000/2.000/-, 512 tokens 2.000/1.500/1.000'
    """
    rows = (
        f"{size} tokens " + "/".join("-" if seconds == math.inf else f"{seconds * 1e3:.3f}" for seconds in times)
        for size, *times in zip(sizes, *layouts, strict=True)
    )
    return f"ms per layer, all-reduce/sequence-parallel/overlapped: {', '.join(rows)}"


def choose_thresholds(
    sizes: Sequence[int],
    all_reduce: Sequence[float],
    sequence_parallel: Sequence[float],
    overlapped: Sequence[float],
) -> tuple[int, int]:
    """Return `max_all_reduce_tokens`, and `min_overlap_tokens` or NO_OVERLAP_TOKENS, by the layouts' seconds.

    `sizes` ascend. The overlapped layout takes precedence over the others, so that it does not count for
    `max_all_reduce_tokens`.

    >>> choose_thresholds([16, 32, 64, 128], [1, 2, 4, 9], [2, 2, 3, 6], [9, 9, 2, 4])
    (32, 64)
    """
    min_overlap_tokens = NO_OVERLAP_TOKENS
    for tokens, seconds, *others in reversed(list(zip(sizes, overlapped, all_reduce, sequence_parallel, strict=True))):
        if seconds > MAX_OVERLAP_RATIO * min(others):
            break
        min_overlap_tokens = tokens
    return crossover(sizes, all_reduce, sequence_parallel), min_overlap_tokens


def crossover(sizes: Sequence[int], times: Sequence[float], other_times: Sequence[float]) -> int:
    """Return the largest size up to which `times` do not exceed `other_times`; 0 if they do at the first size.

    >>> crossover([16, 32, 64], [1, 2, 4], [2, 2, 3])
    32
    """
    largest = 0
    for size, time_, other_time in zip(sizes, times, other_times, strict=True):
        if time_ > other_time:
            break
        largest = size
    return largest


def _sizes(max_tokens: int) -> list[int]:
    """Return powers of two from 16 on, and `max_tokens`.

    >>> _sizes(100)
    [16, 32, 64, 100]
    """
    return [size for size in (1 << bit for bit in range(4, 40)) if size < max_tokens] + [max_tokens]


def layer_seconds(model: CausalLM, layout_type: type[TPLayout], tokens: int) -> float:
    """Return the time of one layer's GEMMs and collectives in layout `layout_type`, without attention."""
    tensor = model.tensor
    assert tensor is not None
    layout = layout_type(tensor, tokens)
    rows = tokens if layout_type is AllReduceLayout else -(-tokens // tensor.ranks)
    x = torch.randn((rows, model.config.hidden_size), dtype=model.dtype, device=tensor.device)
    layer: DecoderLayer = next(iter(model.model.layers.values()))  # type: ignore[assignment]
    return _seconds(lambda: layer.run_gemms(x, layout), tensor.device, captured=tokens <= MAX_CAPTURED_TOKENS)


@torch.inference_mode()
def _seconds(run: Callable[[], object], device: torch.device, *, captured: bool) -> float:
    """Return the time per iteration of the fastest of RUNS runs; `captured`: replay a run's iterations as one graph."""

    def launch() -> None:
        for _ in range(ITERATIONS):
            run()

    launch()  # compiles and allocates
    if captured:
        launch = _captured(launch, device)
    seconds = []
    for _ in range(RUNS + 1):  # the first run warms up
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        launch()
        torch.cuda.synchronize(device)
        seconds.append((time.perf_counter() - began) / ITERATIONS)
    return min(seconds[1:])


def _captured(launch: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Capture `launch` as a CUDA graph, and return the function that replays it.

    Thread-local mode tolerates CUDA calls of the collectives' threads.
    """
    torch.cuda.synchronize(device)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        launch()
    return graph.replay

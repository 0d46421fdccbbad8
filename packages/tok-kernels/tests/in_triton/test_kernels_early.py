"""Tests of programmatic dependent launch (PDL): a kernel that starts early sees all writes of the kernels before it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tok_kernels import AttentionBatch, CascadeLevel, Exchange, KVWrite, LayerCache, rope_table
from tok_kernels.backends.triton import InvariantTritonBackend, TritonBackend
from tok_kernels.collectives.triton_all_reduce import one_shot_all_reduce
from tok_kernels.launch_config import pdl_options, supports_pdl

HEADS, KV_HEADS, HEAD, HIDDEN, INTERMEDIATE, LAYERS = 32, 8, 64, 2048, 8192, 6
PAGE, PREFIX, CONTEXT = 16, 512, 700
REPLAYS = 20


class Layers:
    """Random decoder layers with common weights and a KV cache each, over sequences of CONTEXT tokens.

    The rows of each of the `groups` share their first PREFIX tokens. With `groups` 0, rows share nothing.
    """

    def __init__(self, rows: int, groups: int, backend: TritonBackend) -> None:
        device = torch.device("cuda")
        source = torch.Generator(device).manual_seed(0)

        def noise(*size: int) -> Tensor:
            return torch.randn(size, generator=source, device=device)

        def matrix(outputs: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return noise(outputs, inputs).div_(math.sqrt(inputs)).to(dtype)

        self.backend = backend
        self.norm = (noise(HIDDEN).abs().bfloat16(), 1e-5)
        self.qkv = matrix((HEADS + 2 * KV_HEADS) * HEAD, HIDDEN, torch.float16)
        self.out = matrix(HIDDEN, HEADS * HEAD)
        self.gate_up, self.down = matrix(2 * INTERMEDIATE, HIDDEN), matrix(HIDDEN, INTERMEDIATE)
        pages, shared = -(-CONTEXT // PAGE), PREFIX // PAGE
        size = (rows * pages, PAGE, KV_HEADS, HEAD)
        self.caches = [LayerCache(noise(*size).bfloat16(), noise(*size).bfloat16()) for _ in range(LAYERS)]
        row = torch.arange(rows, dtype=torch.int32, device=device)
        page_table = torch.arange(rows * pages, dtype=torch.int32, device=device).view(rows, pages)
        levels: tuple[CascadeLevel, ...] = ()
        if groups:
            each = rows // groups
            first = row[::each].contiguous()
            page_table[:, :shared] = page_table[first, :shared].repeat_interleave(each, dim=0)
            bounds = (first * 0 + each, first, first * 0, first * 0 + PREFIX)
            levels = (CascadeLevel(first, *bounds, max_rows=each, max_kv=PREFIX),)
        self.position = torch.full((rows,), CONTEXT - 1, device=device)
        self.index = page_table[:, -1].long() * PAGE + (CONTEXT - 1) % PAGE
        self.table = rope_table(HEAD, CONTEXT, 10000.0).to(device)
        self.batch = AttentionBatch(
            page_table=page_table,
            slots=row,
            q_start=torch.arange(rows + 1, dtype=torch.int32, device=device),
            kv_len=row * 0 + CONTEXT,
            kv_start=row * 0 + (PREFIX if groups else 0),
            num_decode=rows,
            max_q=1,
            max_kv=CONTEXT,
            levels=levels,
        )

    def run(self, x_TN: Tensor, between: Callable[[], None]) -> Tensor:
        """Return the output of the layers and leave `x_TN` unchanged; call `between` after each operation."""
        x_TN = x_TN.clone()
        for cache in self.caches:
            write = KVWrite(self.position, self.table, cache, self.index, dtype=torch.bfloat16)
            q = self.backend.project_and_write_kv(x_TN, self.qkv, None, write, norm=self.norm)
            between()
            attended = self.backend.attention(q, cache, self.batch, HEAD**-0.5).flatten(1)
            between()
            x_TN = self.backend.linear(attended, self.out, residual_TN=x_TN)
            between()
            hidden = self.backend.gated_linear(x_TN, self.gate_up, norm=self.norm)
            between()
            x_TN = self.backend.linear(hidden, self.down, residual_TN=x_TN)
            between()
        return x_TN


# Up to 6 of these rows take split-KV attention with a kernel that merges. 16 and 64 rows are merged by the last program
# to arrive, 64 beside the tiles of groups. More rows chain their own keys to those of the prefix.
@pytest.mark.gpu
@pytest.mark.parametrize("kind", [TritonBackend, InvariantTritonBackend])
@pytest.mark.parametrize(("rows", "groups"), [(1, 0), (5, 0), (6, 2), (16, 0), (64, 4), (96, 8), (640, 8)])
def test_pdl_layers_replayed_or_launched_equal_synchronized_layers(
    rows: int, groups: int, kind: type[TritonBackend]
) -> None:
    layers = Layers(rows, groups, kind())
    x = torch.randn((rows, HIDDEN), device="cuda").bfloat16()
    layers.run(x, torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layers.run(x, lambda: None)
    for _ in range(REPLAYS):
        x.normal_()  # new inputs: a kernel that reads too early finds values of the previous replay
        graph.replay()
        replayed = found.clone()
        assert torch.equal(replayed, layers.run(x, torch.cuda.synchronize))
        x.normal_()
        launched = layers.run(x, lambda: None)
        assert torch.equal(launched, layers.run(x, torch.cuda.synchronize))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8])
def test_all_reduces_between_linear_layers_of_replayed_graphs_are_exact(rows: int) -> None:
    """Both ranks run on one GPU, in a stream each. It holds all programs at once, so that none keeps another out."""
    device, backend, size, rounds = torch.device("cuda"), TritonBackend(), 256, 4
    buffers = [torch.zeros(Exchange.buffer_bytes(2), dtype=torch.uint8, device=device) for _ in range(2)]
    channels = [Exchange.from_buffers(buffers, rank, timeout_seconds=10.0).all_reduce for rank in range(2)]
    weights = torch.randn((2, size, size), device=device).div_(math.sqrt(size)).bfloat16()
    x = torch.randn((rows, size), device=device).bfloat16()

    def step(x: Tensor, reduce: Callable[[int, Tensor, Tensor], Tensor], rank: int, rounds: int) -> Tensor:
        x = x.clone()
        for _ in range(rounds):
            x = reduce(rank, backend.linear(x, weights[rank]), x)
        return x

    def exchange(rank: int, part: Tensor, residual: Tensor) -> Tensor:
        return one_shot_all_reduce(part, channels[rank], residual)

    def add(_rank: int, _part: Tensor, residual: Tensor) -> Tensor:
        parts = [backend.linear(residual, weight).float() for weight in weights]
        return (parts[0] + parts[1] + residual.float()).bfloat16()

    for buffer in buffers:
        buffer.zero_()  # as if all words had arrived: a capture must not load kernels
    for rank in range(2):
        step(x, exchange, rank, 1)
    streams, graphs, found = [], [], []
    for rank, channel in enumerate(channels):
        channel.epochs.zero_()
        buffers[rank].fill_(0xFF)
        streams.append(torch.cuda.Stream())  # type: ignore[no-untyped-call]
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[rank], stream=streams[rank]):
            found.append(step(x, exchange, rank, rounds))
    for _ in range(REPLAYS):
        x.normal_()
        torch.cuda.synchronize()
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        expected = step(x, add, 0, rounds)
        assert torch.equal(found[0], expected)
        assert torch.equal(found[1], expected)


def test_pdl_is_off_on_a_cpu() -> None:
    cpu = torch.device("cpu")
    assert not supports_pdl(cpu)
    assert pdl_options(cpu) == {"PDL": False}

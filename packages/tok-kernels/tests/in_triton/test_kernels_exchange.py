"""Tests of exchanges between ranks from within kernels, over symmetric memory.

On one GPU the ranks are concurrent streams, or they run one after another with the words that the others sent in an
earlier round. The interpreter has no PTX, so that it loads and stores the words of a kernel plainly.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from support.interpreted import DEVICES, INTERPRETING, outside, rerun
from tok_kernels import Exchange, SamplingBatch
from tok_kernels.collectives import triton_all_reduce as all_reduce
from tok_kernels.collectives.exchange import BUFFER_SETS, MAX_ALL_REDUCE_BYTES, ExchangeChannel
from tok_kernels.sampling.triton import shard_exchange as sampling_exchange
from tok_kernels.sampling.triton.sampling import sample

CPU = torch.device("cpu")
CUT = {torch.bfloat16: 2**-7}  # the interpreter truncates to this dtype instead of rounding

# The interpreter's NumPy arrays warn of overflow and NaN; a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore:.*(overflow|invalid value|All-NaN slice) encountered:RuntimeWarning")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    for module in (all_reduce, sampling_exchange) if INTERPRETING else ():
        for function in (_store_unit, _load_unit, _receive_unit, _advance_epoch):
            name = function.fn.__name__.removeprefix("_")
            if hasattr(module, name):
                monkeypatch.setattr(module, name, function)
    return torch.device(request.param)


@outside
def test_the_tests_of_this_file_pass_under_the_interpreter() -> None:
    rerun(__file__)


def exchanges(ranks: int, device: torch.device = CPU) -> list[Exchange]:
    """Return an exchange for each rank, over buffers that all ranks share."""
    buffers = [torch.zeros(Exchange.buffer_bytes(ranks), dtype=torch.uint8, device=device) for _ in range(ranks)]
    return [Exchange.from_buffers(buffers, rank, timeout_seconds=10.0) for rank in range(ranks)]


def channels(one: Exchange) -> list[ExchangeChannel]:
    return [one.all_reduce, one.sampling]


@outside
def test_exchange_channels_fill_the_buffer_without_overlap() -> None:
    one = exchanges(3)[1]
    for rank in range(3):
        views = [channel.buffers[rank].view(-1) for channel in channels(one)]
        places = sorted((view.data_ptr(), view.data_ptr() + view.nbytes) for view in views)
        assert all(end <= start for (_, end), (start, _) in pairwise(places))
        assert sum(view.nbytes for view in views) == Exchange.buffer_bytes(3)
        assert all(start % 16 == 0 for start, _ in places)


@outside
def test_a_new_exchange_clears_only_the_buffer_of_its_own_rank() -> None:
    buffers = [torch.zeros(Exchange.buffer_bytes(2), dtype=torch.uint8) for _ in range(2)]
    one = Exchange.from_buffers(buffers, 1, timeout_seconds=2.0)
    assert all(bool((channel.buffers[1] == -1).all()) and not channel.buffers[0].any() for channel in channels(one))
    assert all(not channel.epochs.any() and channel.timeout_ticks == 4_000_000_000 for channel in channels(one))
    assert (one.all_reduce.rank, one.all_reduce.ranks, one.all_reduce.buffers[0].shape[0]) == (1, 2, BUFFER_SETS)
    assert one.all_reduce.programs * one.all_reduce.words * 4 == MAX_ALL_REDUCE_BYTES


@outside
def test_all_reduce_refuses_unsupported_sizes_dtypes_and_residuals() -> None:
    channel = exchanges(2)[0].all_reduce
    too_large = torch.zeros(MAX_ALL_REDUCE_BYTES // 4 + 4)
    for x in (torch.zeros(3), torch.zeros(0), torch.zeros(8, dtype=torch.float64), too_large):
        assert not all_reduce.can_all_reduce(x.nbytes, x.dtype)
        with pytest.raises(ValueError, match=r"x has \d+ bytes of torch\.\w+; allowed: multiples of 16 up to 2097152"):
            all_reduce.one_shot_all_reduce(x, channel)
    with pytest.raises(ValueError, match=r"residual is torch\.float32 \(2, 8\); allowed: as x, \(1, 8\)"):
        all_reduce.one_shot_all_reduce(torch.zeros(1, 8), channel, torch.zeros(2, 8))


@triton.jit
def _store_unit(ptr, words, mask):
    for i in tl.static_range(4):
        tl.store(ptr + i, words[i], mask=mask)


@triton.jit
def _load_unit(ptr, mask):
    return (
        tl.load(ptr, mask=mask, other=0),
        tl.load(ptr + 1, mask=mask, other=0),
        tl.load(ptr + 2, mask=mask, other=0),
        tl.load(ptr + 3, mask=mask, other=0),
    )


@triton.jit
def _receive_unit(ptr, mask, timeout_ticks):
    words = _load_unit(ptr, mask)
    empty = words[0] * 0 + 0xFFFFFFFF
    _store_unit(ptr, (empty, empty, empty, empty), mask)
    return words


@triton.jit
def _advance_epoch(epochs, program, epoch):
    tl.store(epochs + program, epoch + 1)


# Runs one epoch on every rank and returns the results. The last argument counts exchanges that depend on each other.
Meet = Callable[[list[ExchangeChannel], Callable[[int], Tensor], int], list[Tensor]]


def one_by_one(channels: list[ExchangeChannel], compute: Callable[[int], Tensor], rounds: int) -> list[Tensor]:
    """Run the ranks one after another, and repeat the turn with the words that were sent in the round before."""
    begun = [channel.epochs.clone() for channel in channels]
    arrived = [torch.zeros_like(channel.buffers[rank]) for rank, channel in enumerate(channels)]
    found = list[Tensor]()
    for again in range(rounds + 1):
        found, sent = [], [torch.zeros_like(words) for words in arrived]
        for rank, channel in enumerate(channels):
            channel.epochs.copy_(begun[rank])
            for buffer in channel.buffers:
                buffer[:, rank] = 0
            channel.buffers[rank].copy_(arrived[rank])
            found.append(compute(rank))
            for to, buffer in enumerate(channel.buffers):
                sent[to][:, rank] = buffer[:, rank]
            if again == rounds:  # in earlier rounds a rank may have sent words that no other rank reads
                assert bool((channel.buffers[rank][arrived[rank] != 0] == -1).all())
        arrived = sent
    return found


def at_once(channels: list[ExchangeChannel], compute: Callable[[int], Tensor], rounds: int) -> list[Tensor]:
    begun = [channel.epochs.clone() for channel in channels]
    streams = [torch.cuda.Stream() for _ in channels]  # type: ignore[no-untyped-call]
    found = list[Tensor]()
    # First run each rank alone, as if all words had arrived: loading a kernel or allocating memory may synchronize.
    for trial in (True, False):
        for rank, channel in enumerate(channels):
            channel.buffers[rank].fill_(0 if trial else -1)
            channel.epochs.copy_(begun[rank])
        torch.cuda.synchronize()
        found.clear()
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found.append(compute(rank))
            if trial:
                stream.synchronize()
        torch.cuda.synchronize()
    assert all(bool((channel.buffers[rank] == -1).all()) for rank, channel in enumerate(channels))
    return found


@pytest.fixture(params=[one_by_one] if INTERPRETING else [at_once, one_by_one])
def meet(request: pytest.FixtureRequest) -> Meet:
    chosen: Meet = request.param
    return chosen


@pytest.mark.parametrize("dtype", [torch.bfloat16] if INTERPRETING else [torch.float32, torch.bfloat16, torch.float16])
def test_all_reduce_adds_in_the_same_order_on_every_rank(dtype: torch.dtype, meet: Meet, device: torch.device) -> None:
    source, ranks = torch.Generator().manual_seed(1), 3
    everyone = exchanges(ranks, device)
    for shape in ((1, 8), (3, 560), (2, 512)):  # full programs and a partly filled one
        parts = [torch.randn(shape, generator=source).to(device, dtype) for _ in range(ranks)]
        residual = torch.randn(shape, generator=source).to(device, dtype)
        parts[1][0, 0] = torch.nan
        total = parts[0].float() + parts[1].float() + parts[2].float()
        for before in (None, residual):
            expected = (total if before is None else total + before.float()).to(dtype)

            def compute(rank: int, parts: list[Tensor] = parts, before: Tensor | None = before) -> Tensor:
                kept = None if before is None else before.clone()
                return all_reduce.one_shot_all_reduce(parts[rank].clone(), everyone[rank].all_reduce, kept)

            for found in meet([one.all_reduce for one in everyone], compute, 1):
                torch.testing.assert_close(found, expected, rtol=CUT.get(dtype, 0), atol=0, equal_nan=True)
    epochs = everyone[0].all_reduce.epochs
    assert (int(epochs[0]), int(epochs[-1])) == (6, 0)


def test_all_reduce_takes_misaligned_tensors(meet: Meet, device: torch.device) -> None:
    everyone = exchanges(2, device)
    whole = torch.arange(36, dtype=torch.float32, device=device)
    channels = [one.all_reduce for one in everyone]
    found = meet(
        channels, lambda rank: all_reduce.one_shot_all_reduce(whole.clone()[1 + rank : 33 + rank], channels[rank]), 1
    )
    assert all(torch.equal(one, whole[1:33] + whole[2:34]) for one in found)


@dataclass
class _Shards:
    rank: int
    ranks: int
    first: int
    exchange: Exchange | None

    def gather(self, x: Tensor) -> Tensor:
        raise AssertionError("few rows are told from within a kernel")


@pytest.mark.parametrize("cuts", [[1000, 2100], [40]] if INTERPRETING else [[1000, 1700, 2100], [1024], [40]])
def test_sampling_over_exchanged_shards_equals_unsharded(cuts: list[int], meet: Meet, device: torch.device) -> None:
    rows, bounds = 5, [0, *cuts, 2500]
    logits = torch.randn((rows, 2500), generator=torch.Generator().manual_seed(len(cuts))).to(device) * 3
    logits[::5, 900:2000] = -torch.inf
    logits[1::5, 2200:2203] = logits[1::5, 600:601] = 80.0
    heat = torch.tensor([(0.0, 0.7, 1.0, 1e-45, 3e38)[row] for row in range(rows)], device=device)
    count = torch.arange(rows, device=device)
    batch = SamplingBatch(heat, count * 7919, count % 5, count)
    everyone = exchanges(len(cuts) + 1, device)
    for each in (batch, replace(batch, all_greedy=True)):
        whole = sample(logits, each)

        def compute(rank: int, each: SamplingBatch = each) -> Tensor:
            part = logits[:, bounds[rank] : bounds[rank + 1]]
            shards = _Shards(rank, len(everyone), bounds[rank], everyone[rank])
            drawn = sample(part, replace(each, shards=shards))
            return torch.stack((drawn.token.double(), drawn.logprob.double()))

        found = meet([one.sampling for one in everyone], compute, 2)
        assert all(torch.equal(one, found[0]) for one in found)
        assert torch.equal(found[0][0].long(), whole.token)
        torch.testing.assert_close(found[0][1].float(), whole.logprob, rtol=1e-6, atol=1e-5)

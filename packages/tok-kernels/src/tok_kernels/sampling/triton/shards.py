"""Sample from a vocabulary sharded over ranks: the ranks' sums decide which rank owns a row's token.

`tok_kernels.sampling.reference.shards` describes the four numbers that the ranks send each other.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tok_kernels.batch import Shards
from tok_kernels.sampling.triton.block_sampling import BLOCK, PICK_WARPS, RandomKeys, sum_blocks
from tok_kernels.sampling.triton.shard_exchange import sample_exchange
from tok_kernels.sampling.triton.shard_steps import entry_of, own_sums, owner_of

# Arguments whose alignment depends on the number of rows, which must not recompile the kernels.
_UNALIGNED = ["temperature", "peaks", "masses", "published"]


def sample_shards(
    logits_RV: Tensor, keys: RandomKeys, shards: Shards, *, greedy: bool = False, processed: bool = False
) -> tuple[Tensor, Tensor]:
    """Return each row's token, int64 `[R]`, and its log-probability, float32 `[R]`, the same on every rank.

    `logits_RV` is this rank's shard, with the dtype and layout that `sample_blocks` allows. If
    `processed`, log-probabilities are taken at the rows' own temperatures.
    """
    sums = sum_blocks(logits_RV, keys, greedy=greedy)
    channel = None if shards.exchange is None else shards.exchange.sampling
    if channel is not None and 0 < len(logits_RV) <= channel.programs:
        return sample_exchange(logits_RV, sums, keys, shards.first, channel, greedy=greedy, processed=processed)
    return _sample_gathered(logits_RV, sums, keys, shards, greedy=greedy, processed=processed)


def _sample_gathered(
    logits_RV: Tensor, sums: Tensor, keys: RandomKeys, shards: Shards, *, greedy: bool, processed: bool
) -> tuple[Tensor, Tensor]:
    rows, vocabulary = logits_RV.shape
    blocks = triton.cdiv(vocabulary, BLOCK)
    width = triton.next_power_of_2(blocks)
    published = torch.empty((4, rows), dtype=torch.float32, device=logits_RV.device)
    found = torch.empty((2, rows), dtype=torch.float32, device=logits_RV.device)
    if rows:
        _store_rank_sums_kernel[(rows,)](
            *sums, keys.temperature, published, rows, blocks, SAMPLE=not greedy, BLOCKS=width, num_warps=PICK_WARPS
        )
    published = shards.gather(published)
    if rows:
        _find_token_kernel[(rows,)](
            *(logits_RV, logits_RV.stride(0), keys.temperature, keys.seed, keys.sample, keys.position),
            *(sums[0], sums[2], published, found, rows, vocabulary, blocks, shards.first),
            RANK=shards.rank,
            RANKS=shards.ranks,
            SHARDS=triton.next_power_of_2(shards.ranks),
            SAMPLE=not greedy,
            PROCESSED=processed,
            BLOCK=BLOCK,
            BLOCKS=width,
            num_warps=PICK_WARPS,
        )
    # Sums with zeros are exact, and so are token ids in float32.
    token, logprob = shards.gather(found).sum(0)
    return token.long(), logprob


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=[*_UNALIGNED, "sums"])
def _store_rank_sums_kernel(
    peaks: tl.tensor,
    sums: tl.tensor,
    masses: tl.tensor,
    temperature: tl.tensor,
    published: tl.tensor,
    rows: tl.tensor,
    blocks: tl.tensor,
    SAMPLE: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Store this rank's four numbers of a row."""
    row = tl.program_id(0).to(tl.int64)
    peak, total, high, low = own_sums(peaks, sums, masses, temperature, row, blocks, SAMPLE, BLOCKS)
    tl.store(published + row, peak)
    tl.store(published + rows + row, total)
    tl.store(published + 2 * rows + row, high)
    tl.store(published + 3 * rows + row, low)


@triton.jit(
    do_not_specialize=["rows", "first"],
    do_not_specialize_on_alignment=[*_UNALIGNED, "seed", "sample", "position", "found"],
)
def _find_token_kernel(
    logits: tl.tensor,
    stride: tl.tensor,
    temperature: tl.tensor,
    seed: tl.tensor,
    sample: tl.tensor,
    position: tl.tensor,
    peaks: tl.tensor,
    masses: tl.tensor,
    published: tl.tensor,
    found: tl.tensor,
    rows: tl.tensor,
    vocabulary: tl.tensor,
    blocks: tl.tensor,
    first: tl.tensor,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SHARDS: tl.constexpr,
    SAMPLE: tl.constexpr,
    PROCESSED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Choose the owner of the row's token; the owner finds and stores the token, other ranks store zeros."""
    row = tl.program_id(0).to(tl.int64)
    shard = tl.arange(0, SHARDS)
    of = published + shard * 4 * rows + row
    owner, rest, peak, total = owner_of(
        tl.load(of, mask=shard < RANKS, other=-float("inf")),
        tl.load(of + rows, mask=shard < RANKS, other=0.0),
        tl.load(of + 2 * rows, mask=shard < RANKS, other=0.0),
        tl.load(of + 3 * rows, mask=shard < RANKS, other=0.0),
        *(temperature, seed, sample, position, row, SAMPLE, PROCESSED, SHARDS),
    )
    token = tl.full((), 0.0, tl.float32)
    logprob = tl.full((), 0.0, tl.float32)
    if owner == RANK:
        entry, logprob = entry_of(
            *(logits, stride, temperature, peaks, masses, row, rest, peak, total, vocabulary, blocks),
            *(SAMPLE, PROCESSED, BLOCK, BLOCKS),
        )
        token = (first + entry).to(tl.float32)
    tl.store(found + row, token)
    tl.store(found + rows + row, logprob)

"""Sample from a vocabulary sharded over ranks: the sums of all ranks decide which rank owns a row's token.

`tok_kernels.sampling.reference.shards` describes the four sums that each rank sends to the others.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tok_kernels.batch import Shards
from tok_kernels.sampling.triton.block_sampling import BLOCK, SELECT_WARPS, BlockSums, RandomKeys, sum_blocks
from tok_kernels.sampling.triton.shard_exchange import sample_exchange
from tok_kernels.sampling.triton.shard_steps import choose_owner, combine_blocks, sample_in_shard

# Arguments whose alignment depends on the number of rows, which must not recompile the kernels.
_UNALIGNED = ["temperature", "peaks", "masses", "rank_sums"]


def sample_shards(
    logits_RV: Tensor, keys: RandomKeys, shards: Shards, *, greedy: bool, processed: bool
) -> tuple[Tensor, Tensor]:
    """Return each row's token, int64 `[R]`, and its log-probability, float32 `[R]`, the same on every rank.

    `logits_RV` is this rank's shard, with the dtype and layout that `sample_blocks` allows. If `processed`,
    log-probabilities are taken at the rows' own temperatures.
    """
    block_sums = sum_blocks(logits_RV, keys, greedy=greedy)
    channel = None if shards.exchange is None else shards.exchange.sampling
    if channel is not None and 0 < len(logits_RV) <= channel.programs:
        return sample_exchange(logits_RV, block_sums, keys, shards.first, channel, greedy=greedy, processed=processed)
    return _sample_gathered(logits_RV, block_sums, keys, shards, greedy=greedy, processed=processed)


def _sample_gathered(
    logits_RV: Tensor, block_sums: BlockSums, keys: RandomKeys, shards: Shards, *, greedy: bool, processed: bool
) -> tuple[Tensor, Tensor]:
    """Compute `sample_shards` with two all-gathers: of the ranks' sums, and of the owners' tokens."""
    rows, vocabulary = logits_RV.shape
    blocks = triton.cdiv(vocabulary, BLOCK)
    width = triton.next_power_of_2(blocks)
    rank_sums = torch.empty((4, rows), dtype=torch.float32, device=logits_RV.device)
    results = torch.empty((2, rows), dtype=torch.float32, device=logits_RV.device)
    if rows:
        _store_rank_sums_kernel[(rows,)](
            *(*block_sums, keys.temperature, rank_sums, rows, blocks),
            SAMPLE=not greedy,
            BLOCKS=width,
            num_warps=SELECT_WARPS,
        )
    rank_sums = shards.gather(rank_sums)
    if rows:
        _sample_token_kernel[(rows,)](
            *(logits_RV, logits_RV.stride(0), keys.temperature, keys.seed, keys.sample, keys.position),
            *(block_sums.peaks, block_sums.masses, rank_sums, results, rows, vocabulary, blocks, shards.first),
            RANK=shards.rank,
            RANKS=shards.ranks,
            SHARDS=triton.next_power_of_2(shards.ranks),
            SAMPLE=not greedy,
            PROCESSED=processed,
            BLOCK=BLOCK,
            BLOCKS=width,
            num_warps=SELECT_WARPS,
        )
    # The other ranks hold zeros, so the sums are exact; float32 holds token ids exactly.
    token, logprob = shards.gather(results).sum(0)
    return token.long(), logprob


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=[*_UNALIGNED, "sums"])
def _store_rank_sums_kernel(
    peaks: tl.tensor,
    sums: tl.tensor,
    masses: tl.tensor,
    temperature: tl.tensor,
    rank_sums: tl.tensor,
    rows: tl.tensor,
    blocks: tl.tensor,
    SAMPLE: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Store this rank's four sums of a row. Grid: `(rows,)`.

    peaks, sums, masses  float32 [rows, blocks], `BlockSums`
    temperature          float32 [rows]
    rank_sums            float32 [4, rows], result
    """
    row = tl.program_id(0).to(tl.int64)
    peak, total, high, low = combine_blocks(peaks, sums, masses, temperature, row, blocks, SAMPLE, BLOCKS)
    tl.store(rank_sums + row, peak)
    tl.store(rank_sums + rows + row, total)
    tl.store(rank_sums + 2 * rows + row, high)
    tl.store(rank_sums + 3 * rows + row, low)


@triton.jit(
    do_not_specialize=["rows", "first_entry"],
    do_not_specialize_on_alignment=[*_UNALIGNED, "seed", "sample", "position", "results"],
)
def _sample_token_kernel(
    logits: tl.tensor,
    stride: tl.tensor,
    temperature: tl.tensor,
    seed: tl.tensor,
    sample: tl.tensor,
    position: tl.tensor,
    peaks: tl.tensor,
    masses: tl.tensor,
    rank_sums: tl.tensor,
    results: tl.tensor,
    rows: tl.tensor,
    vocabulary: tl.tensor,
    blocks: tl.tensor,
    first_entry: tl.tensor,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SHARDS: tl.constexpr,
    SAMPLE: tl.constexpr,
    PROCESSED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Choose the owner of a row's token; the owner stores token and log-probability, other ranks store zeros.

    Grid: `(rows,)`.

    1. Load the four sums of all ranks, and choose the rank that owns the token: all ranks choose the same.
    2. The owner selects a block and an entry of its shard.
    3. Store token and log-probability, or zeros.

    logits                   [rows, vocabulary], this rank's shard, with `stride` between rows
    temperature to position  [rows], the columns of `RandomKeys`
    peaks, masses            float32 [rows, blocks], of this rank's `BlockSums`
    rank_sums                float32 [RANKS, 4, rows]
    results                  float32 [2, rows], tokens and log-probabilities
    first_entry              first vocabulary entry of this rank
    SHARDS                   RANKS, rounded up to a power of two
    """
    row = tl.program_id(0).to(tl.int64)
    shard = tl.arange(0, SHARDS)
    row_sums = rank_sums + shard * 4 * rows + row
    owner, shard_target, peak, total = choose_owner(
        tl.load(row_sums, mask=shard < RANKS, other=-float("inf")),
        tl.load(row_sums + rows, mask=shard < RANKS, other=0.0),
        tl.load(row_sums + 2 * rows, mask=shard < RANKS, other=0.0),
        tl.load(row_sums + 3 * rows, mask=shard < RANKS, other=0.0),
        *(temperature, seed, sample, position, row, SAMPLE, PROCESSED, SHARDS),
    )
    token = tl.full((), 0.0, tl.float32)
    logprob = tl.full((), 0.0, tl.float32)
    if owner == RANK:
        entry, logprob = sample_in_shard(
            *(logits, stride, temperature, peaks, masses, row, shard_target, peak, total, vocabulary, blocks),
            *(SAMPLE, PROCESSED, BLOCK, BLOCKS),
        )
        token = (first_entry + entry).to(tl.float32)
    tl.store(results + row, token)
    tl.store(results + rows + row, logprob)

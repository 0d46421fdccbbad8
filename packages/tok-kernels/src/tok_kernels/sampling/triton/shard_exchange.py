"""Sample from a vocabulary sharded over ranks in one kernel, which exchanges the sums of the ranks.

The number of rows is limited by the programs of an `ExchangeChannel`.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tok_kernels.collectives.exchange import ExchangeChannel
from tok_kernels.collectives.triton_signals import advance_epoch, escape_empty, message_ptr, receive_unit, store_unit
from tok_kernels.sampling.triton.block_sampling import BLOCK, BlockSums, RandomKeys
from tok_kernels.sampling.triton.shard_steps import choose_owner, combine_blocks, sample_in_shard

# Arguments whose alignment depends on the number of rows, which must not recompile the kernel.
_UNALIGNED = ["temperature", "peaks", "sums", "masses", "seed", "sample", "position", "token", "logprob"]
_THREADS = 32  # one warp; thread r receives the sums of rank r
# Places of the two units of a rank's message.
_SUMS_WORD, _TOKEN_WORD = tl.constexpr(0), tl.constexpr(4)


def sample_exchange(
    logits_RV: Tensor,
    block_sums: BlockSums,
    keys: RandomKeys,
    first_entry: int,
    channel: ExchangeChannel,
    *,
    greedy: bool,
    processed: bool,
) -> tuple[Tensor, Tensor]:
    """Return each row's token, int64 `[R]`, and its log-probability, float32 `[R]`; R is at most `channel.programs`.

    `logits_RV` is this rank's shard of the vocabulary, which begins at entry `first_entry`; `block_sums` are its sums.
    """
    rows, vocabulary = logits_RV.shape
    blocks = triton.cdiv(vocabulary, BLOCK)
    token = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    logprob = torch.empty(rows, dtype=torch.float32, device=logits_RV.device)
    _sample_exchange_kernel[(rows,)](
        *(logits_RV, logits_RV.stride(0), keys.temperature, keys.seed, keys.sample, keys.position),
        *(*block_sums, token, logprob, vocabulary, blocks, first_entry),
        *(channel.buffers, channel.epochs, channel.timeout_ticks),
        SAMPLE=not greedy,
        PROCESSED=processed,
        BLOCK=BLOCK,
        BLOCKS=triton.next_power_of_2(blocks),
        RANK=channel.rank,
        RANKS=channel.ranks,
        PROGRAMS=channel.programs,
        WORDS=channel.words,
        THREADS=_THREADS,
        num_warps=_THREADS // 32,
    )
    return token, logprob


@triton.jit(do_not_specialize=["first_entry"], do_not_specialize_on_alignment=_UNALIGNED)
def _sample_exchange_kernel(
    logits: tl.tensor,
    stride: tl.tensor,
    temperature: tl.tensor,
    seed: tl.tensor,
    sample: tl.tensor,
    position: tl.tensor,
    peaks: tl.tensor,
    sums: tl.tensor,
    masses: tl.tensor,
    token: tl.tensor,
    logprob: tl.tensor,
    vocabulary: tl.tensor,
    blocks: tl.tensor,
    first_entry: tl.tensor,
    buffers: tl.tensor,
    epochs: tl.tensor,
    timeout_ticks: tl.tensor,
    SAMPLE: tl.constexpr,
    PROCESSED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    WORDS: tl.constexpr,
    THREADS: tl.constexpr,
) -> None:
    """Sample one row of a sharded vocabulary. Grid: `(rows,)`.

    1. Combine the row's block sums into this rank's four sums, and send them to all other ranks in one unit.
    2. Receive the other ranks' sums, and choose the rank that owns the token: all ranks choose the same.
    3. The owner selects the token and sends it in another unit; the other ranks receive it.
    4. Store the token and its log-probability.

    logits                     [rows, vocabulary], this rank's shard, with `stride` between rows
    temperature to position    [rows], the columns of `RandomKeys`
    peaks, sums, masses        float32 [rows, blocks], this rank's `BlockSums`
    token, logprob             int64 and float32 [rows], results
    first_entry                first vocabulary entry of this rank
    buffers to timeout_ticks   fields of the `ExchangeChannel`
    THREADS                    threads of the program; thread r receives the sums of rank r
    """
    program = tl.program_id(0)
    row = program.to(tl.int64)
    epoch = tl.load(epochs + program)
    thread = tl.arange(0, THREADS)
    is_first_thread = thread == 0

    # Send this rank's sums to the other ranks, and receive theirs.
    peak, total, mass_high, mass_low = combine_blocks(peaks, sums, masses, temperature, row, blocks, SAMPLE, BLOCKS)
    own_sums = (_float_word(peak), _float_word(total), _float_word(mass_high), _float_word(mass_low))
    _send(own_sums, buffers, epoch, program, _SUMS_WORD, RANK, RANKS, PROGRAMS, WORDS, THREADS)
    is_other_rank = (thread < RANKS) & (thread != RANK)
    message = message_ptr(buffers[RANK], epoch, thread, program, RANKS, PROGRAMS, WORDS) + _SUMS_WORD
    received = receive_unit(message, is_other_rank, timeout_ticks)

    # Choose the owner of the token.
    is_own = thread == RANK
    owner, shard_target, peak, total = choose_owner(
        tl.where(thread < RANKS, tl.where(is_own, peak, received[0].to(tl.float32, bitcast=True)), -float("inf")),
        tl.where(is_own, total, received[1].to(tl.float32, bitcast=True)),
        tl.where(is_own, mass_high, received[2].to(tl.float32, bitcast=True)),
        tl.where(is_own, mass_low, received[3].to(tl.float32, bitcast=True)),
        *(temperature, seed, sample, position, row, SAMPLE, PROCESSED, THREADS),
    )

    # Select the token and send it, or receive it from its owner.
    token_id = tl.full((), 0, tl.int32)
    token_logprob = tl.full((), 0.0, tl.float32)
    if owner == RANK:
        entry, token_logprob = sample_in_shard(
            *(logits, stride, temperature, peaks, masses, row, shard_target, peak, total, vocabulary, blocks),
            *(SAMPLE, PROCESSED, BLOCK, BLOCKS),
        )
        token_id = (first_entry + entry).to(tl.int32)
        zero = epoch.to(tl.uint32) * 0
        token_words = (token_id.to(tl.uint32), _float_word(token_logprob), zero, zero)
        _send(token_words, buffers, epoch, program, _TOKEN_WORD, RANK, RANKS, PROGRAMS, WORDS, THREADS)
    else:
        token_message = message_ptr(buffers[RANK], epoch, owner, program, RANKS, PROGRAMS, WORDS) + _TOKEN_WORD
        received = receive_unit(token_message + thread, is_first_thread, timeout_ticks)
        token_id = tl.sum(tl.where(is_first_thread, received[0].to(tl.int32), 0))
        token_logprob = tl.sum(tl.where(is_first_thread, received[1].to(tl.float32, bitcast=True), 0.0))
    tl.store(token + row, token_id.to(tl.int64))
    tl.store(logprob + row, token_logprob)
    advance_epoch(epochs, program, epoch)


@triton.jit
def _send(
    words: tl.tuple,
    buffers: tl.tuple,
    epoch: tl.tensor,
    program: tl.tensor,
    FIRST_WORD: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    WORDS: tl.constexpr,
    THREADS: tl.constexpr,
) -> None:
    """Send a unit of four words to every other rank, from word FIRST_WORD of the program's message on."""
    thread = tl.arange(0, THREADS)
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            message = message_ptr(buffers[rank], epoch, RANK, program, RANKS, PROGRAMS, WORDS) + FIRST_WORD
            store_unit(message + thread, words, thread == 0)


@triton.jit
def _float_word(number: tl.tensor) -> tl.tensor:
    """Return the bits of a float32 number as a word that can be sent."""
    return escape_empty(number.to(tl.uint32, bitcast=True))

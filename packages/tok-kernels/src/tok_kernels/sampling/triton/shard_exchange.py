"""Sample few rows from a vocabulary sharded over ranks; the ranks exchange their sums within one kernel."""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tok_kernels.collectives.exchange import ExchangeChannel
from tok_kernels.collectives.triton_signals import advance_epoch, escape_empty, message_ptr, receive_unit, store_unit
from tok_kernels.sampling.triton.block_sampling import BLOCK, RandomKeys
from tok_kernels.sampling.triton.shard_steps import entry_of, own_sums, owner_of

# Arguments whose alignment depends on the number of rows, which must not recompile the kernel.
_UNALIGNED = ["temperature", "peaks", "all_reduce", "masses", "seed", "sample", "position", "token", "logprob"]
_THREADS = 32  # one warp, one thread per rank


def sample_exchange(
    logits_RV: Tensor,
    sums: Tensor,
    keys: RandomKeys,
    first: int,
    channel: ExchangeChannel,
    *,
    greedy: bool,
    processed: bool,
) -> tuple[Tensor, Tensor]:
    """Return each row's token, int64 `[R]`, and its log-probability, float32 `[R]`; R is at most `channel.programs`.

    `sums` is the result of `sum_blocks` for `logits_RV`, this rank's shard of the vocabulary from entry `first` on.
    """
    rows, vocabulary = logits_RV.shape
    blocks = triton.cdiv(vocabulary, BLOCK)
    token = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    logprob = torch.empty(rows, dtype=torch.float32, device=logits_RV.device)
    _sample_exchange_kernel[(rows,)](
        *(logits_RV, logits_RV.stride(0), keys.temperature, keys.seed, keys.sample, keys.position),
        *(*sums, token, logprob, vocabulary, blocks, first),
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


@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=_UNALIGNED)
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
    first: tl.tensor,
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
    """Send this rank's four numbers of a row in one unit; the owner of the row's token sends the token in another."""
    program = tl.program_id(0)
    row = program.to(tl.int64)
    epoch = tl.load(epochs + program)
    thread = tl.arange(0, THREADS)
    peak, total, high, low = own_sums(peaks, sums, masses, temperature, row, blocks, SAMPLE, BLOCKS)
    one = thread == 0
    for to in tl.static_range(RANKS):
        if to != RANK:
            published = (_word(peak), _word(total), _word(high), _word(low))
            to_rank = message_ptr(buffers[to], epoch, RANK, program, RANKS, PROGRAMS, WORDS)
            store_unit(to_rank + thread, published, one)
    others = (thread < RANKS) & (thread != RANK)
    message = message_ptr(buffers[RANK], epoch, thread, program, RANKS, PROGRAMS, WORDS)
    received = receive_unit(message, others, timeout_ticks)
    own = thread == RANK
    owner, rest, peak, total = owner_of(
        tl.where(thread < RANKS, tl.where(own, peak, received[0].to(tl.float32, bitcast=True)), -float("inf")),
        tl.where(own, total, received[1].to(tl.float32, bitcast=True)),
        tl.where(own, high, received[2].to(tl.float32, bitcast=True)),
        tl.where(own, low, received[3].to(tl.float32, bitcast=True)),
        *(temperature, seed, sample, position, row, SAMPLE, PROCESSED, THREADS),
    )
    chosen = tl.full((), 0, tl.int32)
    likelihood = tl.full((), 0.0, tl.float32)
    if owner == RANK:
        entry, likelihood = entry_of(
            *(logits, stride, temperature, peaks, masses, row, rest, peak, total, vocabulary, blocks),
            *(SAMPLE, PROCESSED, BLOCK, BLOCKS),
        )
        chosen = (first + entry).to(tl.int32)
        zero = epoch.to(tl.uint32) * 0
        found = (chosen.to(tl.uint32), _word(likelihood), zero, zero)
        for to in tl.static_range(RANKS):
            if to != RANK:
                token_message = message_ptr(buffers[to], epoch, RANK, program, RANKS, PROGRAMS, WORDS) + 4
                store_unit(token_message + thread, found, one)
    else:
        token_message = message_ptr(buffers[RANK], epoch, owner, program, RANKS, PROGRAMS, WORDS) + 4
        received = receive_unit(token_message + thread, one, timeout_ticks)
        chosen = tl.sum(tl.where(one, received[0].to(tl.int32), 0))
        likelihood = tl.sum(tl.where(one, received[1].to(tl.float32, bitcast=True), 0.0))
    tl.store(token + row, chosen.to(tl.int64))
    tl.store(logprob + row, likelihood)
    advance_epoch(epochs, program, epoch)


@triton.jit
def _word(number: tl.tensor) -> tl.tensor:
    """Return the float32 number as a word that can be sent."""
    return escape_empty(number.to(tl.uint32, bitcast=True))

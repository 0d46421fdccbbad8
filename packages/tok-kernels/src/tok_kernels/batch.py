"""What one step computes on: attention and sampling inputs as tensors on the backend's device.

Axes used in names and shapes throughout this package:
  B  sequences of the step          T  query tokens of the step       S  slots
  P  pages a slot may hold          G  prefix groups of a level       R  rows that sample
  H  query heads, K  key/value heads, D  head size, V  vocabulary, N  hidden size
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tok_kernels.collectives.exchange import Exchange


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's keys and values: `k` and `v` are `[pages, page_size, K, D]`.

    Float32, bfloat16, float16 or float8_e4m3fn. What is written to the last is first cut to ±448, its range,
    and rounded to nearest, ties to even. It has no scale: its spacing is 1/8 to 1/16 of a number of any size
    from 2⁻⁶ up to the cut, so that a scale would gain nothing where keys and values lie between.
    """

    k: Tensor
    v: Tensor

    @property
    def page_size(self) -> int:
        return self.k.shape[1]


@dataclass(frozen=True, slots=True)
class QKNorm:
    """RMS norm of every head of queries and keys, ahead of their rotation (Henry et al. 2020, "Query-key
    normalization"): the weights, `[D]`, and what is added to the mean of squares."""

    q_D: Tensor
    k_D: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class CascadeLevel:
    """Groups of decode rows whose sequences share pages, each range of pages read once for its whole group.

    Group `g` is the rows `[row_start[g], row_start[g] + row_count[g])` of the step's decode rows; they
    attend, without a causal mask, to the positions `[kv_start[g], kv_end[g])` found through the page table of
    `slot[g]`. All int32 `[G]`; positions are multiples of the page size. A row is in at most one group of a
    level, and a group may have none (and then no keys). `max_rows` and `max_kv` are host-side upper bounds of
    `row_count` and `kv_end - kv_start`.
    """

    row_start: Tensor
    row_count: Tensor
    slot: Tensor
    kv_start: Tensor
    kv_end: Tensor
    max_rows: int
    max_kv: int


@dataclass(frozen=True, slots=True)
class HostLevel:
    """A cascade level's groups as the host knows them: its tensors of the same names, as int32 arrays `[G]`."""

    row_start: NDArray[np.int32]
    row_count: NDArray[np.int32]
    kv_start: NDArray[np.int32]
    kv_end: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class HostLengths:
    """A step's lengths as the host knows them, for kernels that are planned there: int32 arrays `[B]`.

    `q_len` is the number of query tokens of each sequence; `kv_len` and `kv_start` are the tensors of the same
    names, `levels` one entry a cascade level. What a phase does not read (`Backend.needs_host_lengths`) may hold
    anything.
    """

    q_len: NDArray[np.int32]
    kv_len: NDArray[np.int32]
    kv_start: NDArray[np.int32]
    levels: tuple[HostLevel, ...] = ()


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """What the queries of one step attend to.

    The first `num_decode` sequences have one query token each; the others (prefill chunks) have any number.
    Query token `j` of sequence `b` stands at position `kv_len[b] - q_len[b] + j` and attends causally to the
    positions `[kv_start[b], its own]`; what lies before `kv_start[b]` is covered by the cascade levels, and
    the parts are merged by log-sum-exp (Juravsky et al. 2024, "Hydragen"; Ye et al. 2024, "Cascade
    inference").

    A decode row whose `kv_len` is not above its `kv_start` sees the keys of its levels alone, if any; such rows, with
    0 for both, and groups without rows fill a captured step up to its size.

    page_table  int32 [S, P]   page ids of every slot
    slots       int32 [B]      the slot of each sequence
    q_start     int32 [B + 1]  where each sequence's query tokens begin among the step's T
    kv_len      int32 [B]      positions in the cache once this step's keys are written
    kv_start    int32 [B]      first position read by the sequence itself; 0 without a group
    levels      cascade levels, over disjoint position ranges
    max_q, max_kv              host-side upper bounds of query tokens and kv_len of any sequence
    host        the lengths on the host, where the backend asks for them (`needs_host_lengths`)

    A backend may keep what it plans for a batch as long as it is given the very same object: one object a step.
    """

    page_table: Tensor
    slots: Tensor
    q_start: Tensor
    kv_len: Tensor
    kv_start: Tensor
    num_decode: int
    max_q: int
    max_kv: int
    levels: tuple[CascadeLevel, ...] = ()
    host: HostLengths | None = None


@dataclass(frozen=True, slots=True)
class Contexts:
    """The tokens that r sequences hold, left where the pages of the cache have them.

    Position p of sequence i holds `token_of[page_table[slots[i], p div page_size] · page_size + p mod page_size]` for
    p < `length[i]`; the first `prompt_len[i]` are its prompt, the others were generated.

    page_table  int32 [S, P]   page ids of every slot
    token_of    int64 [C]      the token at each row of the cache
    slots, length, prompt_len  int64 [r]
    max_len     host-side upper bound of every length, at most P · page_size
    """

    page_table: Tensor
    token_of: Tensor
    page_size: int
    slots: Tensor
    length: Tensor
    prompt_len: Tensor
    max_len: int


@dataclass(frozen=True, slots=True)
class Penalties:
    """Rows whose logits depend on the tokens they already hold.

    `rows` int64 `[r]` names them among the R, each once; `contexts` are their sequences; `presence`, `frequency`
    (subtracted; generated tokens only, as in OpenAI's reference) and `repetition` (divides positive,
    multiplies negative logits; prompt and generated; Keskar et al. 2019, "CTRL") are float32 `[r]`.
    """

    rows: Tensor
    contexts: Contexts
    presence: Tensor
    frequency: Tensor
    repetition: Tensor


@dataclass(frozen=True, slots=True)
class LogitBias:
    """Additions to single logits: `logits[row[i], token[i]] += value[i]`; int64 `[m]`, int64 `[m]`, float32
    `[m]`.

    A value of −inf forbids the token.
    """

    row: Tensor
    token: Tensor
    value: Tensor


@dataclass(frozen=True, slots=True)
class Filters:
    """Rows that cut the distribution before drawing: `rows` int64 `[r]`, then one value per such row.

    Applied in the order top-k, top-p, min-p on the temperature-scaled distribution, as transformers does.
    `top_k` int32 (0: off), `top_p` float32 (1: off), `min_p` float32 (0: off).
    """

    rows: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


@dataclass(frozen=True, slots=True)
class Masks:
    """Rows that may draw some tokens only: `rows` int64 `[r]`; of their masks `words`, int32 `[u, ⌈V/32⌉]`, holds
    the distinct ones, and `which`, int64 `[r]`, says whose is which.

    Token t is allowed where bit t mod 32 of word t div 32 is set. The logits of the others become −inf in place:
    there is nothing of them in log-probabilities, either.
    """

    rows: Tensor
    which: Tensor
    words: Tensor


class Shards(Protocol):
    """Logits cut by vocabulary between several ranks: this one's are the entries from `first` on, those of the rank
    after it follow. Every rank draws the same tokens, at the same time.

    exchange   how kernels of the ranks reach each other; None: by `gather` alone
    """

    rank: int
    ranks: int
    first: int
    exchange: Exchange | None

    def gather(self, x: Tensor) -> Tensor:
        """Every rank's `x`, float32 and of one shape, in order: `[ranks, *x.shape]`."""
        ...


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How each of the R rows of logits becomes a token.

    temperature   float32 [R]  0: the largest logit (the lowest id among equals)
    seed          int64   [R]  with `sample` and `position` the whole key of the row's randomness
    sample        int64   [R]  index of the sample among the n of its request
    position      int64   [R]  position that the drawn token will take in its sequence
    penalties, bias, filters, masks   only for the rows that ask; None: no row does
    top_logprobs               how many largest log-probabilities to return; 0: none
    top_rows      int64   [r]  rows that ask for these, each once; None: every row does. Others get zeros
    all_greedy                 the host knows that every temperature is 0, and nothing need be drawn
    shards                     of which part of the vocabulary the logits are; None: all of it. Rows of a part ask
                               for no penalties, bias, filters, masks or top_logprobs: these need whole rows
    """

    temperature: Tensor
    seed: Tensor
    sample: Tensor
    position: Tensor
    penalties: Penalties | None = None
    bias: LogitBias | None = None
    filters: Filters | None = None
    top_logprobs: int = 0
    all_greedy: bool = False
    shards: Shards | None = None
    masks: Masks | None = None
    top_rows: Tensor | None = None

    def __post_init__(self) -> None:
        if self.shards is None:
            return
        for name in ("penalties", "bias", "filters", "masks", "top_logprobs"):
            if getattr(self, name):
                raise ValueError(f"{name} is given; allowed: nothing where the vocabulary is cut (shards)")


@dataclass(frozen=True, slots=True)
class Sampled:
    """What `sample` returns: `token` int64 `[R]` and `logprob` float32 `[R]`, the drawn token's
    log-probability under the model's own distribution (before temperature, penalties, bias and filters, but after
    masks); `top_token` int64 and `top_logprob` float32, `[R, top_logprobs]`, largest first, of the same
    distribution.

    The log-probability is not finite where a logit is NaN or +inf, or all are −inf: such a row has no distribution,
    and its token, which is one of the vocabulary, means nothing.
    """

    token: Tensor
    logprob: Tensor
    top_token: Tensor
    top_logprob: Tensor


def spread_top(rows: Tensor, token_rK: Tensor, logprob_rK: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `top_token` and `top_logprob` of `count` rows of which only `rows` ask."""
    token = token_rK.new_zeros((count, token_rK.shape[1]))
    logprob = logprob_rK.new_zeros((count, logprob_rK.shape[1]))
    return token.index_copy_(0, rows, token_rK), logprob.index_copy_(0, rows, logprob_rK)


def empty_top(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The `top_token` and `top_logprob` of a step in which nobody asks for them."""
    return (
        torch.empty((rows, 0), dtype=torch.int64, device=device),
        torch.empty((rows, 0), dtype=torch.float32, device=device),
    )

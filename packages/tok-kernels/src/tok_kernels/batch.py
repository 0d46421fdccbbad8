"""Define the inputs of one step's attention and sampling, as tensors on the backend's device.

Axes used in names and shapes throughout this package:
  B  sequences of the step    T  query tokens of the step    S  slots
  P  pages a slot may hold    C  rows of the cache           G  prefix groups of a level
  H  query heads              K  key/value heads             D  head size
  R  rows that sample         V  vocabulary                  N  hidden size
A lower-case r counts those of the R rows that have a penalty, filter or mask.
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

    The dtype is float32, bfloat16, float16, float8_e4m3fn or int8. Values written as float8_e4m3fn are clamped to ±448,
    its range, and rounded to nearest, ties to even; NaN stays NaN.

    `k_scale` and `v_scale`, float32 `[K]`, are static per-head scales. The cache then holds each key divided by its
    head's k_scale, and each value divided by its head's v_scale. `Backend.rope_and_write_kv` multiplies queries by
    k_scale, so that the scores are right without a dequantisation of keys. `Backend.attention` multiplies its result by
    v_scale. float8_e4m3fn has its full precision of 1/16 to 1/8 of a number from 2⁻⁶ to 448; scales move the numbers of
    a head into that range.

    `k_token_scale` and `v_token_scale`, float32 `[pages, K, page_size]` and contiguous, are the dynamic per-token
    scales of an int8 cache. The scale of a position and head is 1/127 of the largest absolute value there.
    `Backend.rope_and_write_kv` writes the scales with the quotients, rounded to nearest, ties to even. NaN or an
    infinity makes the scale NaN, and thereby the whole head. For example, 0.5, -2 and 1.27 are stored as 32, -127 and
    81 with the scale 2 / 127.

    Raises ValueError for one scale without the other, for scales of another shape or dtype, and for an int8 cache
    without per-token scales.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    k_token_scale: Tensor | None = None
    v_token_scale: Tensor | None = None

    def __post_init__(self) -> None:
        pages, page_size, heads, _ = self.k.shape
        for kind, shape in (("scale", (heads,)), ("token_scale", (pages, heads, page_size))):
            scales = {name: getattr(self, name) for name in (f"k_{kind}", f"v_{kind}")}
            if len({scale is None for scale in scales.values()}) == 2:
                raise ValueError(f"one of {' and '.join(scales)} is None; allowed: both or neither")
            for name, scale in scales.items():
                if scale is not None and (scale.shape != shape or scale.dtype != torch.float32):
                    raise ValueError(f"{name} is {scale.dtype} {tuple(scale.shape)}; allowed: float32 {shape}")
        is_int8 = self.k.dtype == torch.int8
        has_head_scales, has_token_scales = self.k_scale is not None, self.k_token_scale is not None
        if has_token_scales != is_int8 or (is_int8 and has_head_scales):
            raise ValueError(
                f"the cache is {self.k.dtype}; allowed: int8 with k_token_scale and v_token_scale only, other dtypes "
                "without them"
            )

    @property
    def page_size(self) -> int:
        """Number of positions that a page holds."""
        return self.k.shape[1]


def kv_position_bytes(kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of a position's keys and values in a `LayerCache`, with the scales of an int8 cache."""
    scale = torch.float32.itemsize if dtype == torch.int8 else 0
    return 2 * kv_heads * (head_dim * dtype.itemsize + scale)


@dataclass(frozen=True, slots=True)
class QKNorm:
    """Parameters of the RMS norm of every query and key head, applied before rotation.

    `q_D` and `k_D` are the weights, `[D]`; `eps` is added to the mean of squares (Henry et al. 2020, "Query-key
    normalization").
    """

    q_D: Tensor
    k_D: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class KVWrite:
    """Positions, rotary table and cache rows of a step's tokens, for one layer.

    The fields are the arguments of `Backend.rope_and_write_kv` after q, k and v.
    """

    position_T: Tensor
    cos_sin_LD: Tensor
    cache: LayerCache
    index_T: Tensor
    norm: QKNorm | None = None
    dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class CascadeLevel:
    """One cascade level: groups of decode rows whose sequences share pages, which are read once per group.

    Group `g` consists of the step's decode rows `[row_start[g], row_start[g] + row_count[g])`. These rows attend,
    without a causal mask, to the positions `[kv_start[g], kv_end[g])`, found through the page table of `slot[g]`. All
    tensors are int32 `[G]`, and positions are multiples of the page size. A row is in at most one group of a level. An
    empty group has neither rows nor keys. `max_rows` and `max_kv` are host-side upper bounds of `row_count` and
    `kv_end - kv_start`.
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
    """Host copy of a cascade level's groups: int32 arrays `[G]` with the names of the level's tensors."""

    row_start: NDArray[np.int32]
    row_count: NDArray[np.int32]
    kv_start: NDArray[np.int32]
    kv_end: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class HostLengths:
    """Host copy of a step's lengths, for kernels that are planned on the host: int32 arrays `[B]`.

    `q_len` is the number of query tokens of each sequence. `kv_len` and `kv_start` equal the tensors of the same names,
    and `levels` has one entry per cascade level. Arrays that no planned phase reads (`Backend.needs_host_lengths`) may
    hold anything.
    """

    q_len: NDArray[np.int32]
    kv_len: NDArray[np.int32]
    kv_start: NDArray[np.int32]
    levels: tuple[HostLevel, ...] = ()


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Attention inputs of one step.

    The first `num_decode` sequences have one query token each; the others (prefill chunks) have any number. Query token
    `j` of sequence `b` stands at position `kv_len[b] - q_len[b] + j` and attends causally to the positions from
    `kv_start[b]` to its own. Cascade levels cover the positions before `kv_start[b]`. The partial results are merged by
    log-sum-exp (Juravsky et al. 2024, "Hydragen"; Ye et al. 2024, "Cascade inference").

    A decode row whose `kv_len` is not above its `kv_start` sees only the keys of its levels, if any. Rows whose
    `kv_len` and `kv_start` are 0, and empty groups, pad a captured step to the size of its CUDA graph.

    page_table  int32 [S, P]   page ids of every slot
    slots       int32 [B]      the slot of each sequence
    q_start     int32 [B + 1]  index of each sequence's first query token among the step's T
    kv_len      int32 [B]      positions in the cache once this step's keys are written
    kv_start    int32 [B]      first position that the sequence reads for itself; 0 without a group
    num_decode                 sequences that decode
    max_q, max_kv              host-side upper bounds of any sequence's query tokens and kv_len
    levels                     cascade levels, over disjoint position ranges
    host                       the lengths on the host, if the backend needs them (`Backend.needs_host_lengths`)
    packs       int32 [n, w]   decode rows whose keys a kernel may read together; None: each row's by themselves

    The rows of a pack belong to one sequence: they verify its drafted tokens, and the longest row's pages are those of
    all. Each decode row is in one pack; there are at most `num_decode` packs, of w ≥ 2 rows. Unused entries are −1, as
    the first one of an empty pack is; empty packs come last. If a later row's key or value is not finite, results of
    earlier rows of its pack may not be finite, either (0 × NaN).

    A backend may cache its plan for a batch by object identity. Use one object for all layers of a step, and a new
    object for every step.
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
    packs: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Contexts:
    """The tokens of r sequences, read in place through the sequences' page tables.

    For p below `length[i]`, position p of sequence i holds
    `token_of[page_table[slots[i], p // page_size] * page_size + p % page_size]`.
    The first `prompt_len[i]` tokens are the prompt; the others were generated.

    page_table  int32 [S, P]  page ids of every slot
    token_of    int64 [C]     the token at each row of the cache
    page_size                 positions that a page holds
    slots       int64 [r]     the slot of each sequence
    length      int64 [r]     tokens of each sequence
    prompt_len  int64 [r]     tokens of each prompt
    max_len                   host-side upper bound of every length, at most P · page_size
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
    """Presence, frequency and repetition penalties of the rows that have any.

    rows                int64 [r]    numbers of these rows, each once
    contexts                         tokens of these rows' sequences
    presence_penalty    float32 [r]  subtracted once from the logit of each generated token
    frequency_penalty   float32 [r]  subtracted from the logit of a generated token for each of its occurrences
    repetition_penalty  float32 [r]  divides positive and multiplies negative logits of prompt and generated tokens
                                     (Keskar et al. 2019, "CTRL")

    Presence and frequency penalties are those of OpenAI's API reference.
    """

    rows: Tensor
    contexts: Contexts
    presence_penalty: Tensor
    frequency_penalty: Tensor
    repetition_penalty: Tensor


@dataclass(frozen=True, slots=True)
class LogitBias:
    """Additions to m single logits: `logits[row[i], token[i]] += value[i]`; biases of one logit add up.

    `row` and `token` are int64 `[m]`, and `value` is float32 `[m]`. A value of −inf forbids the token.
    """

    row: Tensor
    token: Tensor
    value: Tensor


@dataclass(frozen=True, slots=True)
class Filters:
    """Top-k, top-p and min-p of the rows that have any, applied in this order after temperature, as in transformers.

    rows   int64 [r]    numbers of these rows
    top_k  int32 [r]    0: off
    top_p  float32 [r]  1: off
    min_p  float32 [r]  0: off
    """

    rows: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


@dataclass(frozen=True, slots=True)
class Masks:
    """Bitmasks of allowed tokens, for the rows that have one (guided decoding).

    rows        int64 [r]          numbers of these rows
    mask_index  int64 [r]          index in `bitmask` of each row's mask
    bitmask     int32 [u, ⌈V/32⌉]  the u distinct masks, in the format of xgrammar

    Token t is allowed if bit `t % 32` of word `t // 32` is set. The logits of all other tokens become −inf in place, so
    log-probabilities exclude these tokens, too.
    """

    rows: Tensor
    mask_index: Tensor
    bitmask: Tensor


class Shards(Protocol):
    """Vocabulary shards of several ranks, for sampling (vocab-parallel logits).

    Each rank has the logits of one range of the vocabulary; ranges follow each other in rank order. All ranks sample
    the same rows at the same time and obtain the same tokens.

    rank      number of this rank
    ranks     number of ranks
    first     first vocabulary entry of this rank
    exchange  buffers through which kernels of the ranks communicate; None: ranks communicate by `gather` only
    """

    rank: int
    ranks: int
    first: int
    exchange: Exchange | None

    def gather(self, x: Tensor) -> Tensor:
        """Return every rank's `x` in rank order, `[ranks, *x.shape]`.

        x is float32 and has the same shape on all ranks.
        """
        ...


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Sampling parameters of the R rows of logits.

    temperature   float32 [R]  0: the token with the largest logit is taken (the lowest id among equals)
    seed          int64   [R]  a row's random numbers depend on its `seed`, `sample` and `position` only
    sample        int64   [R]  index of the sample among the n of its request
    position      int64   [R]  position that the sampled token takes in its sequence
    penalties, bias, filters, masks   those of the rows that have any; None: no row has any
    top_logprobs               number of most likely tokens (top logprobs) to return; 0: none
    top_rows      int64   [r]  rows that get top logprobs, each once; the others get zeros; None: every row
    processed                  return log-probabilities of the distribution that a token is sampled from ("processed
                               logprobs" of vLLM), not of the model's own distribution
    all_greedy                 every temperature is 0, so no random number is needed
    shards                     vocabulary shards of several ranks; None: the logits cover the whole vocabulary

    Raises ValueError if `shards` is combined with penalties, bias, filters, masks or top_logprobs, which need whole
    rows.
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
    processed: bool = False

    def __post_init__(self) -> None:
        if self.shards is None:
            return
        for name in ("penalties", "bias", "filters", "masks", "top_logprobs"):
            if getattr(self, name):
                raise ValueError(f"{name} is given; allowed: nothing if the vocabulary is sharded (shards)")


@dataclass(frozen=True, slots=True)
class Sampled:
    """The result of `Backend.sample`.

    token        int64   [R]
    logprob      float32 [R]                log-probability of the token
    top_token    int64   [R, top_logprobs]  most likely tokens, in descending order
    top_logprob  float32 [R, top_logprobs]  log-probabilities of `top_token`

    Log-probabilities are those of the model's own distribution: after masks, but before temperature, penalties, bias
    and filters. With `SamplingBatch.processed`, they are those after all of these; tokens that a filter removes have
    −inf, and greedy rows count as temperature 1 without filters. `logprob` is not finite if a logit of the row is NaN
    or +inf, or if all are −inf. Such a row has no distribution; its token is a valid vocabulary id but meaningless.
    """

    token: Tensor
    logprob: Tensor
    top_token: Tensor
    top_logprob: Tensor

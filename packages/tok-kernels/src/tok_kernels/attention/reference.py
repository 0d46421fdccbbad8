"""Compute paged attention in plain torch: gather each piece's keys, attend, and merge the pieces of a query.

`tok_kernels.attention.reference_pieces` cuts the step into pieces. Partial results are merged by log-sum-exp. Axes are
those of `tok_kernels.batch`, and N items of a piece, Q queries of an item, L keys of an item.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tok_kernels.attention.reference_pieces import Piece, cascade_pieces, sequence_pieces
from tok_kernels.batch import AttentionBatch, LayerCache


def attention(
    q_THD: Tensor, cache: LayerCache, batch: AttentionBatch, scale: float, window: int | None = None
) -> Tensor:
    """Compute `Backend.attention`; scores, softmax and sums are float32."""
    return attention_with_lse(q_THD, cache, batch, scale, window)[0]


def attention_with_lse(
    q_THD: Tensor, cache: LayerCache, batch: AttentionBatch, scale: float, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the output of `attention`, and the natural log-sum-exp of each query's scaled scores.

    The log-sum-exp is float32 `[T, H]`; it is −inf for a query without keys.
    """
    tokens, heads, size = q_THD.shape
    sizes = (tokens, heads, cache.k.shape[2] * size)
    # The extra last row receives the results of padded queries.
    out = q_THD.new_zeros((tokens + 1, heads, size), dtype=torch.float32)
    lse = q_THD.new_full((tokens + 1, heads), -torch.inf, dtype=torch.float32)
    if tokens:
        for piece in sequence_pieces(batch, *sizes, window):
            _store(out, lse, piece, _attend_piece(q_THD, cache, batch.page_table, piece, scale))
        for level in batch.levels:
            for piece in cascade_pieces(level, batch, *sizes, window):
                shared = _attend_piece(q_THD, cache, batch.page_table, piece, scale)
                previous = out[piece.token_NQ], lse[piece.token_NQ]
                _store(out, lse, piece, merge_states(*previous, *shared))
    if cache.v_scale is not None:
        out *= cache.v_scale.repeat_interleave(heads // cache.k.shape[2]).unsqueeze(-1)
    return out[:tokens].to(q_THD.dtype), lse[:tokens]


def _store(out: Tensor, lse: Tensor, piece: Piece, result: tuple[Tensor, Tensor]) -> None:
    token = piece.token_NQ.flatten()
    out.index_copy_(0, token, result[0].flatten(0, 1))
    lse.index_copy_(0, token, result[1].flatten(0, 1))


def _attend_piece(
    q_THD: Tensor, cache: LayerCache, page_table: Tensor, piece: Piece, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp of a piece's queries, float32 `[N, Q, H, D]` and `[N, Q, H]`."""
    position_NL = piece.start_N.unsqueeze(-1) + torch.arange(piece.width, device=q_THD.device)
    seen_NQL = position_NL.unsqueeze(1) < piece.limit_NQ.unsqueeze(-1)
    if piece.window_start_NQ is not None:
        seen_NQL &= position_NL.unsqueeze(1) >= piece.window_start_NQ.unsqueeze(-1)
    # A position past an item's last key reads that key instead: it has been written, so its values are finite.
    last_N1 = (piece.limit_NQ.amax(-1, keepdim=True) - 1).clamp(min=0)
    row_NL = cache_rows(page_table, piece.slot_N, torch.minimum(position_NL, last_N1), cache.page_size)
    q_NQHD = q_THD[piece.token_NQ.clamp(max=q_THD.shape[0] - 1)].float() * scale
    return _masked_attention(q_NQHD, *gather_kv(cache, row_NL), seen_NQL)


def cache_rows(page_table: Tensor, slot_N: Tensor, position_NL: Tensor, page_size: int) -> Tensor:
    """Return the flat cache rows of positions of the slots, int64 `[N, L]`; negative rows become 0."""
    page_NL = page_table[slot_N.unsqueeze(-1), position_NL // page_size].long()
    return (page_NL * page_size + position_NL % page_size).clamp(min=0)


def gather_kv(cache: LayerCache, row_NL: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values of the given cache rows, float32 `[N, K, L, D]`.

    They are multiplied by their per-token scales, if any, but not by per-head scales.
    """
    k_NKLD, v_NKLD = (_gather_heads(pages, row_NL).float() for pages in (cache.k, cache.v))
    if cache.k_token_scale is None or cache.v_token_scale is None:
        return k_NKLD, v_NKLD
    page_NL, offset_NL = row_NL // cache.page_size, row_NL % cache.page_size
    for x_NKLD, scale_PKS in ((k_NKLD, cache.k_token_scale), (v_NKLD, cache.v_token_scale)):
        x_NKLD *= scale_PKS[page_NL, :, offset_NL].transpose(1, 2).unsqueeze(-1)
    return k_NKLD, v_NKLD


def _gather_heads(pages: Tensor, row_NL: Tensor) -> Tensor:
    """Return the given rows of one layer's keys or values, `[N, L] -> [N, K, L, D]`, contiguous.

    The index includes the head, so one gather yields the layout that the batched matmul needs. Rows of float8 are
    gathered as bytes, because torch's `index_select` does not support float8.
    """
    heads, size = pages.shape[2:]
    row_NKL = row_NL.unsqueeze(1) * heads + torch.arange(heads, device=row_NL.device).unsqueeze(-1)
    rows = pages.view(-1, size)
    if pages.dtype == torch.float8_e4m3fn:
        rows = rows.view(torch.uint8)
    return rows.index_select(0, row_NKL.flatten()).view(pages.dtype).view(*row_NKL.shape, size)


def _masked_attention(q_NQHD: Tensor, k_NKLD: Tensor, v_NKLD: Tensor, seen_NQL: Tensor) -> tuple[Tensor, Tensor]:
    """Return the attention output of scaled queries and its log-sum-exp, float32 `[N, Q, H, D]` and `[N, Q, H]`."""
    items, queries, heads, size = q_NQHD.shape
    kv_heads, keys = k_NKLD.shape[1:3]
    group = heads // kv_heads
    q = q_NQHD.view(items, queries, kv_heads, group, size).transpose(1, 2)
    score = q.reshape(items, kv_heads, queries * group, size) @ k_NKLD.transpose(-1, -2)
    unseen = ~seen_NQL.view(items, 1, queries, 1, keys)
    score.view(items, kv_heads, queries, group, keys).masked_fill_(unseen, -torch.inf)
    peak = score.amax(-1, keepdim=True)
    peak = torch.where(peak == -torch.inf, 0.0, peak)
    weight = score.sub_(peak).exp_()
    total = weight.sum(-1, keepdim=True)
    # A query without keys has a total of 0 and gets zeros, even if the row read in place of its keys holds NaN. NaN in
    # a key or value that the query sees stays NaN.
    out = torch.where(total == 0, 0.0, (weight @ v_NKLD) / total)
    lse = peak + total.log()
    shape = (items, kv_heads, queries, group)
    return (
        out.view(*shape, size).transpose(1, 2).reshape(items, queries, heads, size),
        lse.view(shape).transpose(1, 2).reshape(items, queries, heads),
    )


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two attention results over disjoint keys: float outputs `[..., D]` and natural log-sum-exps `[...]`.

    The result is the mean of the outputs, weighted by the exponentials of their log-sum-exps (Milakov & Gimelshein
    2018; Juravsky et al. 2024). A log-sum-exp of −inf marks a partial result without keys, whose output is ignored. Two
    such results give zeros and −inf. A NaN log-sum-exp gives NaN. The merge is commutative, and associative up to
    rounding.
    """
    peak = torch.maximum(lse_a, lse_b)
    peak = torch.where(peak == -torch.inf, 0.0, peak)
    weight_a, weight_b = torch.exp(lse_a - peak), torch.exp(lse_b - peak)
    total = weight_a + weight_b
    divisor = torch.where(total == 0, 1.0, total)
    share_a = (weight_a / divisor).unsqueeze(-1)
    share_b = (weight_b / divisor).unsqueeze(-1)
    return _weighted(out_a, share_a) + _weighted(out_b, share_b), peak + torch.log(total)


def _weighted(out: Tensor, share: Tensor) -> Tensor:
    # The output of a partial result without keys is undefined. A NaN log-sum-exp makes the share and the result NaN.
    return torch.where(share == 0, 0.0, out * share)

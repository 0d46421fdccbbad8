"""Compute paged attention on a CPU so that a query's bits depend on its own sequence alone.

The keys of a query are read in blocks of KEYS positions that start at multiples of KEYS, by online softmax in the order
of positions (Milakov & Gimelshein 2018). Prefix groups, chunks and cached prefixes change neither the blocks nor their
order. Queries of a sequence are computed in tiles; every matmul has the same shape.

Axes are those of `tok_kernels.batch`, and X tiles, W query tokens of a tile, M = W × (H / K) rows of its matmul.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tok_kernels.attention.reference import gather_kv
from tok_kernels.batch import AttentionBatch, LayerCache

KEYS = 64
_TILE_ROWS = 16
_BUDGET = 1 << 20  # elements of the keys that are gathered at once; they should fit the CPU's cache


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Tiles of query tokens of one sequence each.

    token  int64 [X, W]  index among the step's T query tokens; T where padded
    first  int64 [X, W]  first position that the token sees
    limit  int64 [X, W]  first position behind those that it sees; 0 where padded
    slot   int64 [X]     slot of the sequence
    """

    token: Tensor
    first: Tensor
    limit: Tensor
    slot: Tensor

    def __getitem__(self, part: Tensor | slice) -> _Tiles:
        return _Tiles(self.token[part], self.first[part], self.limit[part], self.slot[part])

    def key_range(self) -> tuple[Tensor, Tensor]:
        """Return the first position that any token of a tile sees, and the last one: int64 `[X]` each."""
        last = self.limit.amax(1)
        return torch.where(self.limit > 0, self.first, last.unsqueeze(1)).amin(1), last - 1


def attention(
    q_THD: Tensor, cache: LayerCache, batch: AttentionBatch, scale: float, window: int | None = None
) -> Tensor:
    """Compute `Backend.attention`. Rows of prefix groups read the shared positions through their own page tables."""
    tokens, heads, size = q_THD.shape
    kv_heads = cache.k.shape[2]
    # The extra last row receives the results of padded queries.
    out_THD = q_THD.new_zeros((tokens + 1, heads, size), dtype=torch.float32)
    scaled_THD = torch.cat((q_THD.float() * scale, q_THD.new_zeros((1, heads, size), dtype=torch.float32)))
    tiles = _tiles(batch, tokens, max(1, _TILE_ROWS // (heads // kv_heads)), window)
    step = max(1, _BUDGET // (kv_heads * KEYS * size))
    for begin in range(0, len(tiles.slot), step):
        part = tiles[begin : begin + step]
        out = _attend(_rows(scaled_THD, part.token, kv_heads), cache, batch.page_table, part)
        width = part.token.shape[1]
        out = out.view(-1, kv_heads, width, heads // kv_heads, size).transpose(1, 2)
        out_THD.index_copy_(0, part.token.flatten(), out.reshape(-1, heads, size))
    if cache.v_scale is not None:
        out_THD *= cache.v_scale.repeat_interleave(heads // kv_heads).unsqueeze(-1)
    return out_THD[:tokens].to(q_THD.dtype)


def _tiles(batch: AttentionBatch, tokens: int, width: int, window: int | None) -> _Tiles:
    """Cut every sequence's query tokens into tiles of `width`."""
    q_start = batch.q_start.long()
    count = q_start.diff()
    tiles_of = -(-count // width)
    owner = torch.repeat_interleave(torch.arange(len(count)), tiles_of)
    nth = torch.arange(len(owner)) - (tiles_of.cumsum(0) - tiles_of)[owner]
    query = (nth * width).unsqueeze(1) + torch.arange(width)
    present = query < count[owner].unsqueeze(1)
    token = torch.where(present, q_start[owner].unsqueeze(1) + query, tokens)
    limit = (batch.kv_len.long() - count)[owner].unsqueeze(1) + query + 1
    limit = torch.where(present, limit, 0).clamp(min=0)
    first = torch.zeros_like(limit) if window is None else (limit - window).clamp(min=0)
    return _Tiles(token, first, limit, batch.slots.long()[owner])


def _rows(scaled_THD: Tensor, token_XW: Tensor, kv_heads: int) -> Tensor:
    """Return the queries of the tiles as rows of matmuls: `[X, K, M, D]`."""
    tiles, width = token_XW.shape
    q_XWKGD = scaled_THD[token_XW].view(tiles, width, kv_heads, -1, scaled_THD.shape[2])
    return q_XWKGD.transpose(1, 2).reshape(tiles, kv_heads, -1, scaled_THD.shape[2])


def _attend(q_XKMD: Tensor, cache: LayerCache, page_table: Tensor, tiles: _Tiles) -> Tensor:
    """Return the outputs of the tiles' rows, float32 `[X, K, M, D]`; zeros for a row without keys."""
    begin, last = tiles.key_range()
    group = q_XKMD.shape[2] // tiles.token.shape[1]
    top = q_XKMD.new_full(q_XKMD.shape[:3], -torch.inf)
    total, acc = torch.zeros_like(top), torch.zeros_like(q_XKMD)
    blocks = range(int(begin.min()) // KEYS, int(last.max()) // KEYS + 1)
    for block in blocks:
        some = ((begin // KEYS <= block) & (last // KEYS >= block)).nonzero()[:, 0]
        if not len(some):
            continue
        position = block * KEYS + torch.arange(KEYS)
        part = tiles[some]
        row = _cache_rows(page_table, part.slot, position, begin[some], last[some], cache.page_size)
        k, v = (x.flatten(0, 1) for x in gather_kv(cache, row))
        seen = (position >= part.first.unsqueeze(-1)) & (position < part.limit.unsqueeze(-1))
        hidden = ~seen.repeat_interleave(group, dim=1).unsqueeze(1)
        score = torch.bmm(q_XKMD[some].flatten(0, 1), k.transpose(-1, -2))
        score = score.view(len(some), -1, *score.shape[1:]).masked_fill(hidden, -torch.inf)
        peak = torch.maximum(top[some], score.amax(-1))
        shift = torch.where(peak == -torch.inf, 0.0, peak)
        weight = torch.exp(score - shift.unsqueeze(-1))
        shrink = torch.exp(top[some] - shift)
        more = torch.bmm(weight.flatten(0, 1), v).view(acc[some].shape)
        top[some], total[some] = peak, total[some] * shrink + weight.sum(-1)
        acc[some] = acc[some] * shrink.unsqueeze(-1) + more
    total = total.unsqueeze(-1)
    return torch.where(total == 0, 0.0, acc / total)


def _cache_rows(
    page_table: Tensor, slot_X: Tensor, position_L: Tensor, first_X: Tensor, last_X: Tensor, page_size: int
) -> Tensor:
    """Return the flat cache rows of the positions, int64 `[X, L]`; for one outside of a tile's keys, a key's row.

    That row has been written, so its values are finite and a weight of zero removes them.
    """
    position = torch.minimum(torch.maximum(position_L, first_X.unsqueeze(1)), last_X.unsqueeze(1))
    page = page_table[slot_X.unsqueeze(1), position // page_size].long()
    return (page * page_size + position % page_size).clamp(min=0)

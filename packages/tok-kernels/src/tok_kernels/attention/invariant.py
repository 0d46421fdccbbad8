"""Compute batch-invariant paged attention on a CPU: a query's bits depend on its own sequence alone.

Online softmax (Milakov & Gimelshein 2018) reads the keys of a query in blocks of BLOCK_KEYS positions, in order. Blocks
start at multiples of BLOCK_KEYS, so prefix groups, chunks and cached prefixes change neither the blocks nor their
order. Queries of a sequence are computed in tiles, so that every matmul has the same shape.

Axes are those of `tok_kernels.batch`, and X tiles, W query tokens of a tile, M = W × (H / K) rows of its matmul, L keys
of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tok_kernels.attention.reference import cache_rows, gather_kv
from tok_kernels.batch import AttentionBatch, LayerCache

BLOCK_KEYS = 64  # positions
_TILE_ROWS = 16  # query tokens × query heads per key/value head
_MAX_ELEMENTS = 1 << 20  # of the keys that are gathered at once, so that they fit the CPU's cache


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Tiles of query tokens of one sequence each.

    token  int64 [X, W]  index among the step's T query tokens; T where padded
    first  int64 [X, W]  first position that the token sees
    limit  int64 [X, W]  end of the positions that it sees; 0 where padded
    slot   int64 [X]     slot of the sequence
    """

    token: Tensor
    first: Tensor
    limit: Tensor
    slot: Tensor

    def __getitem__(self, index: Tensor | slice) -> _Tiles:
        return _Tiles(self.token[index], self.first[index], self.limit[index], self.slot[index])

    def key_range(self) -> tuple[Tensor, Tensor]:
        """Return the first and the last position that any token of a tile sees: int64 `[X]` each."""
        last = self.limit.amax(1)
        return torch.where(self.limit > 0, self.first, last.unsqueeze(1)).amin(1), last - 1


def attention(
    q_THD: Tensor, cache: LayerCache, batch: AttentionBatch, scale: float, window: int | None = None
) -> Tensor:
    """Compute `Backend.attention`. Cascade levels are ignored: each row reads shared positions itself."""
    tokens, heads, size = q_THD.shape
    kv_heads = cache.k.shape[2]
    # The extra last row receives the results of padded queries.
    out_THD = q_THD.new_zeros((tokens + 1, heads, size), dtype=torch.float32)
    scaled_THD = torch.cat((q_THD.float() * scale, q_THD.new_zeros((1, heads, size), dtype=torch.float32)))
    tiles = _tiles(batch, tokens, max(1, _TILE_ROWS // (heads // kv_heads)), window)
    tiles_at_once = max(1, _MAX_ELEMENTS // (kv_heads * BLOCK_KEYS * size))
    for begin in range(0, len(tiles.slot), tiles_at_once):
        chunk = tiles[begin : begin + tiles_at_once]
        out_XKMD = _attend(_query_rows(scaled_THD, chunk.token, kv_heads), cache, batch.page_table, chunk)
        out = out_XKMD.view(-1, kv_heads, chunk.token.shape[1], heads // kv_heads, size).transpose(1, 2)
        out_THD.index_copy_(0, chunk.token.flatten(), out.reshape(-1, heads, size))
    if cache.v_scale is not None:
        out_THD *= cache.v_scale.repeat_interleave(heads // kv_heads).unsqueeze(-1)
    return out_THD[:tokens].to(q_THD.dtype)


def _tiles(batch: AttentionBatch, tokens: int, width: int, window: int | None) -> _Tiles:
    """Cut every sequence's query tokens into tiles of `width`."""
    q_start = batch.q_start.long()
    count = q_start.diff()
    tile_count = -(-count // width)
    sequence = torch.repeat_interleave(torch.arange(len(count)), tile_count)
    tile_index = torch.arange(len(sequence)) - (tile_count.cumsum(0) - tile_count)[sequence]  # within the sequence
    query = (tile_index * width).unsqueeze(1) + torch.arange(width)
    present = query < count[sequence].unsqueeze(1)
    token = torch.where(present, q_start[sequence].unsqueeze(1) + query, tokens)
    limit = (batch.kv_len.long() - count)[sequence].unsqueeze(1) + query + 1
    limit = torch.where(present, limit, 0).clamp(min=0)
    first = torch.zeros_like(limit) if window is None else (limit - window).clamp(min=0)
    return _Tiles(token, first, limit, batch.slots.long()[sequence])


def _query_rows(scaled_THD: Tensor, token_XW: Tensor, kv_heads: int) -> Tensor:
    """Return the queries of the tiles as the rows of their matmuls, `[X, K, M, D]`."""
    tiles, width = token_XW.shape
    q_XWKGD = scaled_THD[token_XW].view(tiles, width, kv_heads, -1, scaled_THD.shape[2])
    return q_XWKGD.transpose(1, 2).reshape(tiles, kv_heads, -1, scaled_THD.shape[2])


def _attend(q_XKMD: Tensor, cache: LayerCache, page_table: Tensor, tiles: _Tiles) -> Tensor:
    """Return the outputs of the tiles' rows, float32 `[X, K, M, D]`; zeros for a row without keys."""
    first_key, last_key = tiles.key_range()
    group = q_XKMD.shape[2] // tiles.token.shape[1]
    row_max = q_XKMD.new_full(q_XKMD.shape[:3], -torch.inf)
    row_sum, acc = torch.zeros_like(row_max), torch.zeros_like(q_XKMD)
    for block in range(int(first_key.min()) // BLOCK_KEYS, int(last_key.max()) // BLOCK_KEYS + 1):
        active = ((first_key // BLOCK_KEYS <= block) & (last_key // BLOCK_KEYS >= block)).nonzero()[:, 0]
        if not len(active):
            continue
        # Gather the block's keys and values.
        position = block * BLOCK_KEYS + torch.arange(BLOCK_KEYS)
        tile = tiles[active]
        # A position outside a tile's keys reads one of these keys instead: its values are finite.
        read_XL = torch.minimum(torch.maximum(position, first_key[active, None]), last_key[active, None])
        k, v = (x.flatten(0, 1) for x in gather_kv(cache, cache_rows(page_table, tile.slot, read_XL, cache.page_size)))

        # Compute the scores; −inf where the token does not see the position.
        seen = (position >= tile.first.unsqueeze(-1)) & (position < tile.limit.unsqueeze(-1))
        unseen = ~seen.repeat_interleave(group, dim=1).unsqueeze(1)
        score = torch.bmm(q_XKMD[active].flatten(0, 1), k.transpose(-1, -2))
        score = score.view(len(active), -1, *score.shape[1:]).masked_fill(unseen, -torch.inf)

        # Update the state of online softmax.
        peak = torch.maximum(row_max[active], score.amax(-1))
        shift = torch.where(peak == -torch.inf, 0.0, peak)
        weight = torch.exp(score - shift.unsqueeze(-1))
        rescale = torch.exp(row_max[active] - shift)
        block_acc = torch.bmm(weight.flatten(0, 1), v).view(acc[active].shape)
        row_max[active], row_sum[active] = peak, row_sum[active] * rescale + weight.sum(-1)
        acc[active] = acc[active] * rescale.unsqueeze(-1) + block_acc
    row_sum = row_sum.unsqueeze(-1)
    return torch.where(row_sum == 0, 0.0, acc / row_sum)

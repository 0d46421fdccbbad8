"""Define device functions that find the tile of query rows of a program, and the keys that its rows see."""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def token_count(
    first_ptr: tl.tensor, count_ptr: tl.tensor, item: tl.tensor, present: tl.tensor, CAUSAL: tl.constexpr
) -> tl.tensor:
    """Return the number of query tokens of items, as `VarlenItems` describes it."""
    if CAUSAL:
        begin = tl.load(first_ptr + item, mask=present, other=0)
        return tl.load(first_ptr + item + 1, mask=present, other=0) - begin
    else:
        return tl.load(count_ptr + item, mask=present, other=0)


@triton.jit
def _tiles_per_item(
    first_ptr: tl.tensor,
    count_ptr: tl.tensor,
    i: tl.tensor,
    present: tl.tensor,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    CAUSAL: tl.constexpr,
) -> tl.tensor:
    """Return the number of tiles of items `i`."""
    return tl.cdiv(token_count(first_ptr, count_ptr, i, present, CAUSAL) * GROUP, ROWS)


@triton.jit
def _count_tiles(
    first_ptr: tl.tensor,
    count_ptr: tl.tensor,
    offset: tl.tensor,
    items: tl.tensor,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    ITEMS: tl.constexpr,
    CAUSAL: tl.constexpr,
) -> tl.tensor:
    """Return the number of tiles of all items."""
    total = 0
    for base in range(0, items, ITEMS):
        i = base + tl.arange(0, ITEMS)
        total += tl.sum(_tiles_per_item(first_ptr, count_ptr, offset + i, i < items, GROUP, ROWS, CAUSAL), 0)
    return total


@triton.jit
def _find_item(
    first_ptr: tl.tensor,
    count_ptr: tl.tensor,
    offset: tl.tensor,
    items: tl.tensor,
    tile: tl.tensor,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    ITEMS: tl.constexpr,
    CAUSAL: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Return the item that holds tile number `tile`, and the number of tiles before that item."""
    item_index = 0
    tiles_before_item = 0
    tiles_counted = 0
    for base in range(0, items, ITEMS):
        i = base + tl.arange(0, ITEMS)
        present = i < items
        tiles = _tiles_per_item(first_ptr, count_ptr, offset + i, present, GROUP, ROWS, CAUSAL)
        tile_ends = tiles_counted + tl.cumsum(tiles, 0)
        is_before = present & (tile_ends <= tile)
        item_index += tl.sum(is_before.to(tl.int32), 0)
        tiles_before_item = tl.maximum(tiles_before_item, tl.max(tl.where(is_before, tile_ends, 0), 0))
        tiles_counted += tl.sum(tiles, 0)
    return item_index, tiles_before_item


@triton.jit
def find_tile(
    first_ptr: tl.tensor,
    count_ptr: tl.tensor,
    offset: tl.tensor,
    items: tl.tensor,
    tiles_per_item: tl.tensor,
    splits: tl.tensor,
    target_programs: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    ITEMS: tl.constexpr,
    CAUSAL: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Return this program's key/value head, item, first row within the item, split, and number of splits of a tile.

    The item is `items` or more if this program has no tile. For example, 2 items of 3 and 1 tiles with 2 splits: the
    programs of a key/value head compute (item, tile, split) = 000, 001, 010, 011, 020, 021, 100, 101.
    """
    program = tl.program_id(0)
    kv_head = program % KV_HEADS
    splits_used = 1
    if splits > 1:
        total = _count_tiles(first_ptr, count_ptr, offset, items, GROUP, ROWS, ITEMS, CAUSAL)
        splits_used = tl.maximum(tl.minimum(target_programs // tl.maximum(total, 1), splits), 1)
    split = program // KV_HEADS % splits_used
    tile = program // KV_HEADS // splits_used
    if tiles_per_item > 0:
        item = tile // tiles_per_item
        tiles_before_item = item * tiles_per_item
    else:
        item, tiles_before_item = _find_item(first_ptr, count_ptr, offset, items, tile, GROUP, ROWS, ITEMS, CAUSAL)
    return kv_head, item, (tile - tiles_before_item) * ROWS, split, splits_used


@triton.jit
def visible_keys(
    start: tl.tensor,
    end: tl.tensor,
    tokens: tl.tensor,
    first_row: tl.tensor,
    query: tl.tensor,
    token: tl.tensor,
    present: tl.tensor,
    length_ptr: tl.tensor,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Return which of the positions [start, end) the rows of a tile see.

    limit         [ROWS]  end of the positions that the row sees
    window_start  [ROWS]  first position of the row's window; `limit` without WINDOW
    start, end    range of the positions that at least one row sees
    causal_begin  position below which no row needs a causal mask
    window_end    position from which on no row needs a window mask

    For example, 3 causal tokens over the positions [0, 8) with WINDOW 4 and GROUP 1 stand at positions 5 to 7:
    limit [6, 7, 8], window_start [2, 3, 4], start 2, end 8, causal_begin 6, window_end 4.
    """
    if CAUSAL:
        first_position = end - tokens
        limit = first_position + query + 1
        causal_begin = first_position + first_row // GROUP + 1
        last_query = tl.minimum((first_row + ROWS - 1) // GROUP, tokens - 1)
        end = first_position + last_query + 1
    else:
        limit = tl.full([ROWS], 0, tl.int32) + end
        causal_begin = end
    window_start = limit
    window_end = start
    if WINDOW:
        if CAUSAL:
            window_start = limit - WINDOW
            start = tl.maximum(start, causal_begin - WINDOW)
            window_end = end - WINDOW
        else:
            length = tl.load(length_ptr + token, mask=present, other=0)
            window_start = length - WINDOW
            live = present & (length > 0)  # rows of ended sequences need no keys
            start = tl.maximum(start, tl.min(tl.where(live, window_start, end), 0))
            window_end = tl.max(tl.where(live, window_start, start), 0)
    return limit, window_start, start, end, causal_begin, window_end

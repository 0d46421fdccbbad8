"""Attend from ragged queries to paged keys: one program for each tile of query rows, key/value head and split of keys.

An item is a prefill chunk or a group of decode rows. Its query rows are its query tokens times the query heads of a
key/value head. Each program finds its tile of rows on the GPU, because the host does not know the lengths of items. If
tiles may be few, their keys are split (split-KV): the programs of a launch are divided evenly among the tiles.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from tok_kernels import launch_config as config
from tok_kernels.attention.triton.online_softmax import attend, cast_queries, finish, load_partial
from tok_kernels.attention.triton.operands import Operands
from tok_kernels.attention.triton.split_kv_partials import SplitKVPartials
from tok_kernels.attention.triton.varlen_tiles import find_tile, token_count, visible_keys

_ITEMS = 256  # items that a program counts at a time while it searches for its tile
_LONG_TILE_KEYS = 4096  # keys from which on a single unsplit tile may outlast all others


@dataclass(frozen=True, slots=True)
class VarlenItems:
    """Ragged queries over paged keys: `num_items` items, from index `offset` of the tensors on; all tensors are int32.

    Item `i` has the `count[i]` query tokens from token `first[i]` on. Its tokens attend to the positions
    `[start[i], end[i])`, found through the page table of `slot[i]`.

    If `count` is None, the item has `first[i + 1] - first[i]` tokens and is causal: its last query stands at
    `end[i] - 1`. Otherwise each query sees all keys of the item. A window restricts these to the last positions of the
    sequence of the query's token, which has `length` positions.

    Host-side upper bounds are `max_tokens` for the tokens of all items together, and `max_item_tokens` and `max_keys`
    for the tokens and keys of any one item.
    """

    first: Tensor
    count: Tensor | None
    slot: Tensor
    start: Tensor
    end: Tensor
    offset: int
    num_items: int
    max_tokens: int
    max_item_tokens: int
    max_keys: int
    length: Tensor


@triton.jit(
    # A value that changes from step to step must not recompile the kernel.
    do_not_specialize=[
        "page_table_stride",
        "offset",
        "items",
        "tiles_per_item",
        "base_token",
        "rows",
        "splits",
        "target_programs",
        "min_keys",
        "prior",
        "first_partial",
    ],
    do_not_specialize_on_alignment=[
        *("first_ptr", "count_ptr", "slots_ptr", "start_ptr", "end_ptr", "length_ptr", "page_table_ptr")
    ],
)
def _varlen_attention_kernel(
    q_ptr: tl.tensor,
    out_ptr: tl.tensor,
    part_out_ptr: tl.tensor,
    part_lse_ptr: tl.tensor,
    first_ptr: tl.tensor,
    count_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    start_ptr: tl.tensor,
    end_ptr: tl.tensor,
    length_ptr: tl.tensor,
    offset: tl.tensor,
    items: tl.tensor,
    tiles_per_item: tl.tensor,
    base_token: tl.tensor,
    rows: tl.tensor,
    splits: tl.tensor,
    target_programs: tl.tensor,
    min_keys: tl.tensor,
    prior: tl.tensor,
    first_partial: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    kv_page_stride: tl.tensor,
    kv_row_stride: tl.tensor,
    kv_head_stride: tl.tensor,
    page_table_stride: tl.tensor,
    scale: tl.tensor,
    v_scale_ptr: tl.tensor | None,
    k_token_scale_ptr: tl.tensor | None,
    v_token_scale_ptr: tl.tensor | None,
    PAGE: tl.constexpr,
    HEAD: tl.constexpr,
    PADDED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    FP16: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    ITEMS: tl.constexpr,
    CAUSAL: tl.constexpr,
    TRIGGER_PDL: tl.constexpr,
) -> None:
    """Attend from one tile of query rows to the keys of its item, or to one split of them.

    A query row is one query token with one query head; a tile has the rows `query × GROUP + head` of one key/value
    head. Grid: `(tiles × splits × KV_HEADS,)`, with the key/value head changing fastest.

    1. Find the program's tile and split; a program without keys returns.
    2. Compute which keys each row sees, and the program's part of them.
    3. Load the queries, and partial result 0 if `prior`.
    4. Run online softmax over up to three ranges of keys: window mask, no mask, causal mask.
    5. Store the output, or the split's partial result. Split 0 also marks the tile's unused splits.

    q_ptr, out_ptr           [T, H, HEAD]; out_ptr is contiguous
    part_out_ptr             float32 [splits, rows, H, HEAD], partial outputs
    part_lse_ptr             float32 [splits, rows, H], base-2 log-sum-exps
    first_ptr to length_ptr  int32, the fields of `VarlenItems`
    tiles_per_item           tiles of every item; 0: each program searches for its tile
    base_token               token that is row 0 of a partial result
    rows                     rows of a partial result
    splits                   maximum number of ranges into which a tile's keys are split; empty ranges are marked as
                             having no keys
    target_programs          programs per key/value head that the ranges of all tiles should fill
    min_keys                 minimum keys of a range
    prior                    start from partial result 0
    first_partial            partial result that split 0 writes; −1: write the output
    ROWS, KEYS               query rows of a tile; keys of a block
    ITEMS                    items that the search for a tile counts at a time
    CAUSAL                   `VarlenItems.count` is None
    TRIGGER_PDL              the kernel launched next may start once all programs of this one have started

    `Operands` describes the other arguments.
    """
    if TRIGGER_PDL:
        gdc_launch_dependents()

    # Find the tile.
    kv_head, item, first_row, split, splits_used = find_tile(
        *(first_ptr, count_ptr, offset, items, tiles_per_item, splits, target_programs),
        *(KV_HEADS, GROUP, ROWS, ITEMS, CAUSAL),
    )
    if item >= items:
        return
    item += offset
    first_token = tl.load(first_ptr + item)
    tokens = token_count(first_ptr, count_ptr, item, True, CAUSAL)
    slot = tl.load(slots_ptr + item).to(tl.int64)
    start = tl.load(start_ptr + item)
    item_end = tl.load(end_ptr + item)
    if first_row >= tokens * GROUP:
        return
    row = first_row + tl.arange(0, ROWS)
    query = row // GROUP
    head = kv_head * GROUP + row % GROUP
    present = query < tokens
    token = (first_token + query).to(tl.int64)

    # Compute the keys that the rows see, the split of them, and the range in which no row needs a mask.
    limit, window_start, start, end, causal_begin, window_end = visible_keys(
        start, item_end, tokens, first_row, query, token, present, length_ptr, GROUP, ROWS, WINDOW, CAUSAL
    )
    keys_per_split = tl.maximum(tl.cdiv(tl.cdiv(item_end - start, KEYS), splits_used), tl.cdiv(min_keys, KEYS)) * KEYS
    begin = start + split * keys_per_split
    splits_written = tl.maximum(tl.cdiv(end - start, keys_per_split), 1)
    end = tl.minimum(end, begin + keys_per_split)
    if (split > 0) & (begin >= end):
        return
    unmasked_begin = begin
    if WINDOW:
        unmasked_begin = tl.minimum(tl.maximum(begin, window_end), tl.maximum(begin, end))
    unmasked_end = unmasked_begin + tl.maximum(tl.minimum(end, causal_begin) - unmasked_begin, 0) // KEYS * KEYS

    # Load the queries and the prior state.
    d = tl.arange(0, PADDED)
    d_mask = d < HEAD
    mask = present[:, None] & d_mask[None, :]
    q = tl.load(q_ptr + (token * q_token_stride + head * q_head_stride)[:, None] + d[None, :], mask=mask, other=0.0)
    q = cast_queries(q, FP16)
    head_row = (token - base_token) * (KV_HEADS * GROUP) + head
    part_offset = head_row[:, None] * HEAD + d[None, :]
    state = load_partial(part_lse_ptr + head_row, part_out_ptr + part_offset, present & (prior != 0), d_mask)

    # Read the keys and values.
    k_ptr += kv_head * kv_head_stride
    v_ptr += kv_head * kv_head_stride
    page_table_ptr += slot * page_table_stride
    if k_token_scale_ptr is not None:
        k_token_scale_ptr += kv_head * PAGE
        v_token_scale_ptr += kv_head * PAGE
    if WINDOW:
        state = attend(
            *(q, state, window_start, limit, begin, unmasked_begin),
            *(k_ptr, v_ptr, page_table_ptr, kv_page_stride, kv_row_stride, scale),
            *(k_token_scale_ptr, v_token_scale_ptr, PAGE, KEYS, HEAD, PADDED, KV_HEADS, True, True),
        )
    state = attend(
        *(q, state, window_start, limit, unmasked_begin, unmasked_end),
        *(k_ptr, v_ptr, page_table_ptr, kv_page_stride, kv_row_stride, scale),
        *(k_token_scale_ptr, v_token_scale_ptr, PAGE, KEYS, HEAD, PADDED, KV_HEADS, False, False),
    )
    state = attend(
        *(q, state, window_start, limit, unmasked_end, end),
        *(k_ptr, v_ptr, page_table_ptr, kv_page_stride, kv_row_stride, scale),
        *(k_token_scale_ptr, v_token_scale_ptr, PAGE, KEYS, HEAD, PADDED, KV_HEADS, True, WINDOW > 0),
    )

    # Store the output or the partial result.
    out, lse = finish(state)
    if first_partial < 0:
        if v_scale_ptr is not None:
            out *= tl.load(v_scale_ptr + kv_head)
        out_offset = (token * (KV_HEADS * GROUP) + head)[:, None] * HEAD + d[None, :]
        tl.store(out_ptr + out_offset, out.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        partial_offset = (first_partial + split).to(tl.int64) * rows * (KV_HEADS * GROUP)
        tl.store(part_lse_ptr + partial_offset + head_row, lse, mask=present)
        tl.store(part_out_ptr + partial_offset * HEAD + part_offset, out, mask=mask)
        if split == 0:
            for unused in range(splits_written, splits):
                partial_offset = (first_partial + unused).to(tl.int64) * rows * (KV_HEADS * GROUP)
                tl.store(part_lse_ptr + partial_offset + head_row, float("-inf"), mask=present)


def tile_splits(operands: Operands, items: VarlenItems) -> int:
    """Return the maximum number of programs that share a tile's keys: as many as pay if one item has all tokens."""
    return _splits(operands, items, _cdiv(items.max_tokens * operands.group, _launch(operands).rows))


def splits_pay(operands: Operands, items: VarlenItems) -> bool:
    """Return whether a split pays for its merge: tiles are certainly few, or they may be few and have many keys."""
    return _splits(operands, items, _item_tile_counts(operands, items)[0]) > 1 or (
        items.max_keys >= _LONG_TILE_KEYS and tile_splits(operands, items) > 1
    )


def _splits(operands: Operands, items: VarlenItems, tiles: int) -> int:
    programs, device = tiles * operands.kv_heads, operands.q.device
    return config.splits(programs, _launch(operands), items.max_keys, config.MIN_TILE_SPLIT_KEYS, device)


def tile_counts(rows: int, group: int, num_items: int, max_tokens: int, max_item_tokens: int) -> tuple[int, int]:
    """Return the number of tiles to launch, and the tiles of every item (0: each program searches for its tile).

    Tiles have `rows` query rows, and each token has `group` of them; the other arguments are those of `VarlenItems`.

    Without the search, every item gets as many tiles as its bound needs. With it, an item without tokens gets no tile,
    and any other item wastes less than one. A search costs a program more than a few empty programs do, but less than
    many: for 256 mostly empty groups over 8 rows, the search launches tiles by rows and not by groups.
    """
    tiles_per_item = _cdiv(max_item_tokens * group, rows)
    searched = _cdiv(max_tokens * group, rows) + min(num_items, max_tokens)
    tiles = num_items * tiles_per_item
    return (tiles, tiles_per_item) if tiles <= 2 * searched else (searched, 0)


def _item_tile_counts(operands: Operands, items: VarlenItems) -> tuple[int, int]:
    bounds = items.num_items, items.max_tokens, items.max_item_tokens
    return tile_counts(_launch(operands).rows, operands.group, *bounds)


def run_varlen_attention(
    operands: Operands,
    items: VarlenItems,
    out_THD: Tensor,
    parts: SplitKVPartials,
    *,
    base_token: int,
    splits: int,
    prior: bool,
    first_partial: int,
) -> None:
    """Attend from the items' query tokens to their keys; the arguments after `parts` are those of the kernel."""
    launch = _launch(operands)
    count = items.first if items.count is None else items.count
    tiles, tiles_per_item = _item_tile_counts(operands, items)
    target_programs = max(1, launch.programs * config.multiprocessors(operands.q.device) // operands.kv_heads)
    if splits > 1:
        tiles, tiles_per_item = max(tiles, target_programs), 0
    _varlen_attention_kernel[(tiles * operands.kv_heads,)](
        *(operands.q, out_THD, parts.out, parts.lse, items.first, count, items.slot, items.start, items.end),
        items.length,
        *(items.offset, items.num_items, tiles_per_item, base_token, parts.rows),
        *(splits, target_programs, config.MIN_TILE_SPLIT_KEYS, int(prior), first_partial),
        *operands.runtime(),
        *operands.token_scales(),
        ROWS=launch.rows,
        KEYS=launch.keys,
        ITEMS=_ITEMS,
        CAUSAL=items.count is None,
        TRIGGER_PDL=items.count is not None and config.supports_pdl(operands.q.device),
        **operands.static(),
        num_warps=launch.warps,
        num_stages=launch.stages,
        maxnreg=launch.registers,
    )


def _cdiv(number: int, size: int) -> int:
    return -(-number // size)


def _launch(operands: Operands) -> config.AttentionLaunch:
    return config.tile_launch(operands.padded_head, operands.q.dtype)

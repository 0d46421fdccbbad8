"""Attend from many query tokens to one range of keys: one program per tile of rows, KV head and split.

The rows of the matmul are the query tokens of an item times the query heads of a key/value head. An item is a prefill
chunk or a group of decode rows. Items are cut into tiles of rows on the GPU, because only the GPU knows their lengths.
If there may be few tiles, the programs of a launch are divided evenly among the tiles, and those of one tile split its
keys.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from tok_kernels import launch_config as config
from tok_kernels.attention.triton.online_softmax import attend, computed, finish, resume
from tok_kernels.attention.triton.operands import Operands
from tok_kernels.attention.triton.split_kv_partials import SplitKVPartials
from tok_kernels.attention.triton.varlen_tiles import find_tile, token_count, visible_keys

_ITEMS = 256  # items counted at a time when a program searches for its item
_LONG_TILE_KEYS = 4096  # keys from which an unsplit tile takes long


@dataclass(frozen=True, slots=True)
class VarlenItems:
    """Ragged queries over paged keys; all tensors are int32.

    Item `i`, from `offset` on, has `count[i]` query tokens from token `first[i]` on. Its queries attend to the
    positions `[start[i], end[i])`, found through the page table of `slot[i]`.

    If `count` is None, it is `first[i + 1] - first[i]`, and the item is causal: its last query stands at `end[i] - 1`.
    Otherwise each query sees all keys of the item. A window then restricts these to the last positions of the sequence
    of the query's token, which has `length` positions. `number` is the number of items. `most_tokens` is a host-side
    upper bound of the tokens of all items; `most_tokens_each` and `most_keys` bound the tokens and keys of any one
    item.
    """

    first: Tensor
    count: Tensor | None
    slot: Tensor
    start: Tensor
    end: Tensor
    offset: int
    number: int
    most_tokens: int
    most_tokens_each: int
    most_keys: int
    length: Tensor


@triton.jit(
    # Values that change from step to step must not recompile the kernel.
    do_not_specialize=[
        "table_row",
        "offset",
        "items",
        "each",
        "base",
        "rows",
        "splits",
        "wanted",
        "min_keys",
        "prior",
        "part",
    ],
    do_not_specialize_on_alignment=[
        *("first_ptr", "count_ptr", "slots_ptr", "start_ptr", "end_ptr", "length_ptr", "table_ptr")
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
    each: tl.tensor,
    base: tl.tensor,
    rows: tl.tensor,
    splits: tl.tensor,
    wanted: tl.tensor,
    min_keys: tl.tensor,
    prior: tl.tensor,
    part: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    table_ptr: tl.tensor,
    kv_page: tl.tensor,
    kv_row: tl.tensor,
    kv_head_stride: tl.tensor,
    table_row: tl.tensor,
    scale: tl.tensor,
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

    `each`: tiles that every item is given; 0: programs search for theirs. `splits`: maximum number of ranges into which
    a tile's keys are split, so that about `wanted` programs have one of `min_keys` keys or more. The partial result of
    an empty range stays unwritten. `prior`: start from partial result 0. `part`: the partial result that split 0
    writes; −1: the result is final. Row 0 of a partial result is token `base`. WINDOW: the positions that a query sees;
    0 for all. TRIGGER_PDL: the kernel launched next may start as soon as all programs of this one have started.
    """
    if TRIGGER_PDL:
        gdc_launch_dependents()
    kv_head, item, packed, split, used = find_tile(
        first_ptr, count_ptr, offset, items, each, splits, wanted, KV_HEADS, GROUP, ROWS, ITEMS, CAUSAL
    )
    if item >= items:
        return
    item += offset
    first = tl.load(first_ptr + item)
    count = token_count(first_ptr, count_ptr, item, True, CAUSAL)
    slot = tl.load(slots_ptr + item).to(tl.int64)
    start = tl.load(start_ptr + item)
    end = tl.load(end_ptr + item)
    if packed >= count * GROUP:
        return
    row = packed + tl.arange(0, ROWS)
    query = row // GROUP
    head = kv_head * GROUP + row % GROUP
    present = query < count
    token = (first + query).to(tl.int64)

    limit, window, start, end_here, seen_by_all, last_window = visible_keys(
        start, end, count, packed, query, token, present, length_ptr, GROUP, ROWS, WINDOW, CAUSAL
    )
    share = tl.maximum(tl.cdiv(tl.cdiv(end - start, KEYS), used), tl.cdiv(min_keys, KEYS)) * KEYS
    begin = start + split * share
    end_here = tl.minimum(end_here, begin + share)
    if (split > 0) & (begin >= end_here):
        return
    full = begin
    if WINDOW:
        full = tl.minimum(tl.maximum(begin, last_window), tl.maximum(begin, end_here))
    whole = full + tl.maximum(tl.minimum(end_here, seen_by_all) - full, 0) // KEYS * KEYS

    d = tl.arange(0, PADDED)
    d_present = d < HEAD
    both = present[:, None] & d_present[None, :]
    q = tl.load(q_ptr + (token * q_token + head * q_head)[:, None] + d[None, :], mask=both, other=0.0)
    q = computed(q, FP16)
    line = (token - base) * (KV_HEADS * GROUP) + head
    part_offset = line[:, None] * HEAD + d[None, :]
    top, total, acc = resume(part_lse_ptr + line, part_out_ptr + part_offset, present & (prior != 0), d_present)
    k_ptr += kv_head * kv_head_stride
    v_ptr += kv_head * kv_head_stride
    table_ptr += slot * table_row
    if WINDOW:
        top, total, acc = attend(
            *(q, top, total, acc, window, limit, begin, full, k_ptr, v_ptr, table_ptr, kv_page, kv_row, scale),
            *(PAGE, KEYS, HEAD, PADDED, True, True),
        )
    top, total, acc = attend(
        *(q, top, total, acc, window, limit, full, whole, k_ptr, v_ptr, table_ptr, kv_page, kv_row, scale),
        *(PAGE, KEYS, HEAD, PADDED, False, False),
    )
    top, total, acc = attend(
        *(q, top, total, acc, window, limit, whole, end_here, k_ptr, v_ptr, table_ptr, kv_page, kv_row, scale),
        *(PAGE, KEYS, HEAD, PADDED, True, WINDOW > 0),
    )
    out, lse = finish(top, total, acc)
    if part < 0:
        out_offset = (token * (KV_HEADS * GROUP) + head)[:, None] * HEAD + d[None, :]
        tl.store(out_ptr + out_offset, out.to(out_ptr.dtype.element_ty), mask=both)
    else:
        before = (part + split).to(tl.int64) * rows * (KV_HEADS * GROUP)
        tl.store(part_lse_ptr + before + line, lse, mask=present)
        tl.store(part_out_ptr + before * HEAD + part_offset, out, mask=both)


def tile_splits(operands: Operands, items: VarlenItems) -> int:
    """Return the maximum number of programs per tile's keys, from host bounds, as if one item had all tokens."""
    return _splits(operands, items, _cdiv(items.most_tokens * operands.group, _launch(operands).rows))


def splits_pay(operands: Operands, items: VarlenItems) -> bool:
    """Return whether splitting tiles is worth a merge pass.

    It is if tiles are certainly few, or if they may be few and have many keys.
    """
    return _splits(operands, items, _tile_counts(operands, items)[0]) > 1 or (
        items.most_keys >= _LONG_TILE_KEYS and tile_splits(operands, items) > 1
    )


def _splits(operands: Operands, items: VarlenItems, tiles: int) -> int:
    programs, device = tiles * operands.kv_heads, operands.q.device
    return config.splits(programs, _launch(operands), items.most_keys, config.TILE_SPLIT_KEYS, device)


def _tile_counts(operands: Operands, items: VarlenItems) -> tuple[int, int]:
    """Return the number of tiles to launch, and how many of them each item is given (0: programs search for theirs).

    Searching costs a program more than launching an empty program, unless there are many empty ones. Without the
    search, every item gets tiles for its bound. With it, items without a token get no tile, and each other item wastes
    less than one. Loose bounds, such as 256 mostly empty groups over 8 rows, then cost tiles by rows and not by groups.
    """
    rows = _launch(operands).rows
    each = _cdiv(items.most_tokens_each * operands.group, rows)
    together = _cdiv(items.most_tokens * operands.group, rows) + min(items.number, items.most_tokens)
    return (items.number * each, each) if items.number * each <= 2 * together else (together, 0)


def run_varlen_attention(
    operands: Operands,
    items: VarlenItems,
    out_THD: Tensor,
    parts: SplitKVPartials,
    *,
    base: int,
    splits: int,
    prior: bool,
    part: int,
) -> None:
    """Attend from the items' query tokens to their keys; `base`, `splits`, `prior` and `part` as in the kernel."""
    launch = _launch(operands)
    count = items.first if items.count is None else items.count
    tiles, each = _tile_counts(operands, items)
    wanted = max(1, launch.programs * config.multiprocessors(operands.q.device) // operands.kv_heads)
    if splits > 1:
        tiles, each = max(tiles, wanted), 0
    _varlen_attention_kernel[(tiles * operands.kv_heads,)](
        *(operands.q, out_THD, parts.out, parts.lse, items.first, count, items.slot, items.start, items.end),
        items.length,
        *(items.offset, items.number, each, base, parts.rows),
        *(splits, wanted, config.TILE_SPLIT_KEYS, int(prior), part),
        *operands.runtime(),
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

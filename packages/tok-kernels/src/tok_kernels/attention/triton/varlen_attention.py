"""Attend from many query tokens to one range of keys: one program per tile of rows, KV head and split.

The rows of the matmul are the query tokens of an item times the query heads of a key/value head. An item is a prefill
chunk or a group of decode rows. Items are cut into tiles of rows on the GPU, because only the GPU knows their lengths.
If there may be few tiles, the programs of a launch are divided evenly among the tiles, and those of one tile split its
keys.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def, no-untyped-call"

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


@triton.jit
def _count(first_ptr, count_ptr, item, present, CAUSAL: tl.constexpr):
    if CAUSAL:
        begin = tl.load(first_ptr + item, mask=present, other=0)
        return tl.load(first_ptr + item + 1, mask=present, other=0) - begin
    else:
        return tl.load(count_ptr + item, mask=present, other=0)


@triton.jit
def _tiles_of(first_ptr, count_ptr, i, present, GROUP: tl.constexpr, ROWS: tl.constexpr, CAUSAL: tl.constexpr):
    return tl.cdiv(_count(first_ptr, count_ptr, i, present, CAUSAL) * GROUP, ROWS)


@triton.jit
def _total(
    first_ptr,
    count_ptr,
    offset,
    items,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    ITEMS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Return the number of tiles of all items."""
    total = 0
    for base in range(0, items, ITEMS):
        i = base + tl.arange(0, ITEMS)
        total += tl.sum(_tiles_of(first_ptr, count_ptr, offset + i, i < items, GROUP, ROWS, CAUSAL), 0)
    return total


@triton.jit
def _find(
    first_ptr,
    count_ptr,
    offset,
    items,
    tile,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    ITEMS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Return the item that holds tile number `tile`, and how many tiles precede that item."""
    passed = 0
    skipped = 0
    counted = 0
    for base in range(0, items, ITEMS):
        i = base + tl.arange(0, ITEMS)
        present = i < items
        tiles = _tiles_of(first_ptr, count_ptr, offset + i, present, GROUP, ROWS, CAUSAL)
        ends = counted + tl.cumsum(tiles, 0)
        done = present & (ends <= tile)
        passed += tl.sum(done.to(tl.int32), 0)
        skipped = tl.maximum(skipped, tl.max(tl.where(done, ends, 0), 0))
        counted += tl.sum(tiles, 0)
    return passed, skipped


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
        "least",
        "prior",
        "part",
    ],
    do_not_specialize_on_alignment=[
        *("first_ptr", "count_ptr", "slots_ptr", "start_ptr", "end_ptr", "length_ptr", "table_ptr")
    ],
)
def _varlen_attention_kernel(
    q_ptr,
    out_ptr,
    part_out_ptr,
    part_lse_ptr,
    first_ptr,
    count_ptr,
    slots_ptr,
    start_ptr,
    end_ptr,
    length_ptr,
    offset,
    items,
    each,
    base,
    rows,
    splits,
    wanted,
    least,
    prior,
    part,
    q_token,
    q_head,
    k_ptr,
    v_ptr,
    table_ptr,
    kv_page,
    kv_row,
    kv_head_stride,
    table_row,
    scale,
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
):
    """Attend from one tile of query rows to the keys of its item, or to one split of them.

    `each`: tiles that every item is given; 0: programs search for theirs. `splits`: maximum number of ranges into which
    a tile's keys are split, so that about `wanted` programs have one of `least` keys or more. The partial result of an
    empty range stays unwritten. `prior`: start from partial result 0. `part`: the partial result that split 0 writes;
    −1: the result is final. Row 0 of a partial result is token `base`. WINDOW: the positions that a query sees; 0 for
    all. LEADS: the kernel launched next may start as soon as all programs of this one have started.
    """
    if TRIGGER_PDL:
        gdc_launch_dependents()
    program = tl.program_id(0)
    kv_head = program % KV_HEADS
    used = 1
    if splits > 1:
        total = _total(first_ptr, count_ptr, offset, items, GROUP, ROWS, ITEMS, CAUSAL)
        used = tl.maximum(tl.minimum(wanted // tl.maximum(total, 1), splits), 1)
    split = program // KV_HEADS % used
    tile = program // KV_HEADS // used
    if each > 0:
        item = tile // each
        skipped = item * each
    else:
        item, skipped = _find(first_ptr, count_ptr, offset, items, tile, GROUP, ROWS, ITEMS, CAUSAL)
    if item >= items:
        return
    item += offset
    first = tl.load(first_ptr + item)
    count = _count(first_ptr, count_ptr, item, True, CAUSAL)
    slot = tl.load(slots_ptr + item).to(tl.int64)
    start = tl.load(start_ptr + item)
    end = tl.load(end_ptr + item)

    packed = (tile - skipped) * ROWS
    if packed >= count * GROUP:
        return
    row = packed + tl.arange(0, ROWS)
    query = row // GROUP
    head = kv_head * GROUP + row % GROUP
    present = query < count
    token = (first + query).to(tl.int64)
    if CAUSAL:
        limit = end - count + query + 1
        seen_by_all = end - count + packed // GROUP + 1
        last = tl.minimum((packed + ROWS - 1) // GROUP, count - 1)
        end_here = end - count + last + 1
    else:
        limit = tl.full([ROWS], 0, tl.int32) + end
        seen_by_all = end
        end_here = end
    # First position of each row's window. No key before the earliest of them is read, and from the latest on no row
    # needs a window mask.
    window = limit
    if WINDOW:
        if CAUSAL:
            window = limit - WINDOW
            start = tl.maximum(start, seen_by_all - WINDOW)
            last_window = end_here - WINDOW
        else:
            window = tl.load(length_ptr + token, mask=present, other=0) - WINDOW
            start = tl.maximum(start, tl.min(tl.where(present, window, end), 0))
            last_window = tl.max(tl.where(present, window, start), 0)
    share = tl.maximum(tl.cdiv(tl.cdiv(end - start, KEYS), used), tl.cdiv(least, KEYS)) * KEYS
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

"""Tests that every Triton kernel compiles for compute capability 9.0 (H100, H200) on a machine without a GPU.

The package's own wrappers launch the kernels on meta tensors, which notes the kernels' variants and runs nothing.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
from triton.runtime.jit import JITFunction  # type: ignore[import-untyped]

import tok_kernels
from tok_kernels import (
    MAX_TILES,
    AttentionBatch,
    CascadeLevel,
    Contexts,
    DraftRows,
    Exchange,
    ExpertCopies,
    ExpertWeights,
    Filters,
    KVWrite,
    LayerCache,
    LogitBias,
    Masks,
    NgramTable,
    PackedWeight,
    Penalties,
    QKNorm,
    SamplingBatch,
    ScaledWeight,
    SlotColumns,
    launch_config,
)
from tok_kernels.attention.triton import invariant
from tok_kernels.backends.triton import TritonBackend
from tok_kernels.collectives.triton_all_reduce import one_shot_all_reduce
from tok_kernels.compilation import Variant
from tok_kernels.linear import triton_invariant
from tok_kernels.moe import triton_invariant as invariant_moe

BF16, FP8, INT64, FLOAT = torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.float32
HEADS, KV_HEADS, HIDDEN, INNER, VOCABULARY, SLOTS, PAGES, PAGE = 32, 8, 4096, 14336, 128256, 64, 512, 16
BACKEND = TritonBackend()


def meta(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def kv_cache(head_dim: int, dtype: torch.dtype, scaled: bool = False) -> LayerCache:
    k, v = (meta(SLOTS, PAGE, KV_HEADS, head_dim, dtype=dtype) for _ in range(2))
    if dtype == torch.int8:
        return LayerCache(k, v, None, None, *(meta(SLOTS, KV_HEADS, PAGE, dtype=FLOAT) for _ in range(2)))
    return LayerCache(k, v, *(meta(KV_HEADS, dtype=FLOAT) for _ in range(2 * scaled)))


def attend(
    head_dim: int,
    rows: int = 0,
    chunks: tuple[int, int] = (0, 0),
    max_kv: int = 640,
    groups: int = 0,
    cache_dtype: torch.dtype = BF16,
    window: int | None = None,
    scaled: bool = False,
    dtype: torch.dtype = BF16,
    max_pack_rows: int | None = None,
) -> None:
    """Attend from `rows` decode rows, in `groups` if any, and from `chunks` (number, new tokens of each)."""
    number, new = chunks
    sequences = rows + number
    starts, counts, slots = (meta(groups) for _ in range(3))
    level = CascadeLevel(starts, counts, slots, starts, starts, max_rows=rows, max_kv=max_kv)
    batch = AttentionBatch(
        *(meta(SLOTS, PAGES), meta(sequences), meta(sequences + 1), meta(sequences), meta(sequences)),
        num_decode=rows,
        max_q=max(1, new),
        max_kv=max_kv,
        levels=(level,) if groups else (),
        packs=None if max_pack_rows is None else meta(rows, max_pack_rows),
    )
    q = meta(rows + number * new, HEADS, head_dim, dtype=dtype)
    cache = kv_cache(head_dim, cache_dtype, scaled)
    BACKEND.attention(q, cache, batch, head_dim**-0.5, window)
    if cache.k_token_scale is None:
        invariant.attention(q, cache, batch, head_dim**-0.5, window)


def rotate_and_write(head_dim: int, cache_dtype: torch.dtype, scaled: bool = False) -> None:
    tokens = 64
    q, k, v = (meta(tokens, heads, head_dim, dtype=BF16) for heads in (HEADS, KV_HEADS, KV_HEADS))
    position, table = meta(tokens, dtype=INT64), meta(8192, head_dim, dtype=FLOAT)
    cache = kv_cache(head_dim, cache_dtype, scaled)
    norm = QKNorm(meta(head_dim, dtype=BF16), meta(head_dim, dtype=BF16), 1e-6)
    for one in (None, norm):
        BACKEND.rope_and_write_kv(q, k, v, position, table, cache, position, one)


def project_and_write(tokens: int, cache_dtype: torch.dtype) -> None:
    """Launch fused QKV projections; of 64 tokens, those of weights with many rows only."""
    rows = 16384 if tokens == 64 else 6144
    x, position, table = meta(tokens, HIDDEN, dtype=BF16), meta(tokens, dtype=INT64), meta(8192, 128, dtype=FLOAT)
    write = KVWrite(position, table, kv_cache(128, cache_dtype, False), position, dtype=BF16)
    weight, norm = meta(rows, HIDDEN, dtype=torch.float16), (meta(HIDDEN, dtype=BF16), 1e-5)
    scaled = ScaledWeight(meta(rows, HIDDEN, dtype=FP8), meta(rows, 1, dtype=FLOAT))
    for bias in (None, meta(rows, dtype=torch.float16)):
        BACKEND.project_and_write_kv(x, weight, bias, write, norm=norm)
        BACKEND.scaled_project_and_write_kv(x, scaled, bias, write, norm=norm)


def read_and_write_int8(head_dim: int, dtype: torch.dtype = BF16) -> None:
    """Launch the kernels of an int8 KV cache."""
    attend(head_dim, rows=1024, cache_dtype=torch.int8, dtype=dtype)
    attend(head_dim, rows=4, max_kv=8192, cache_dtype=torch.int8, dtype=dtype)
    attend(head_dim, rows=2048, chunks=(16, 512), groups=8, cache_dtype=torch.int8, dtype=dtype)
    rotate_and_write(head_dim, torch.int8)


def multiply(tokens: int) -> None:
    x, residual = (meta(tokens, HIDDEN, dtype=BF16) for _ in range(2))
    norm = meta(HIDDEN, dtype=BF16), 1e-5
    for one in (BACKEND, triton_invariant):
        one.linear(x, meta(6144, HIDDEN, dtype=BF16), meta(6144, dtype=BF16), norm=norm)
        one.gated_linear(x, meta(2 * INNER, HIDDEN, dtype=BF16), norm=norm)
        one.linear(meta(tokens, INNER, dtype=BF16), meta(HIDDEN, INNER, dtype=BF16), residual_TN=residual)


def multiply_8_bits(tokens: int, dtype: torch.dtype, group: int | None = None) -> None:
    def weight(outputs: int, inputs: int) -> ScaledWeight:
        groups = 1 if group is None else inputs // group
        return ScaledWeight(meta(outputs, inputs, dtype=dtype), meta(outputs, groups, dtype=FLOAT), group, group or 1)

    x, residual = (meta(tokens, HIDDEN, dtype=BF16) for _ in range(2))
    norm = meta(HIDDEN, dtype=BF16), 1e-5
    down = weight(HIDDEN, INNER)
    BACKEND.scaled_linear(x, weight(6144, HIDDEN), meta(6144, dtype=BF16), norm=norm)
    BACKEND.scaled_linear(x, weight(HIDDEN, HIDDEN), residual_TN=residual)
    gated = BACKEND.scaled_gated_linear(x, weight(2 * INNER, HIDDEN), norm=norm, down=down)
    BACKEND.scaled_linear(gated, down, residual_TN=residual)


def multiply_packed(tokens: int, bits: int, group: int | None, zeros: bool, *, ordered: bool = False) -> None:
    def weight(outputs: int, inputs: int, dtype: torch.dtype = BF16) -> PackedWeight:
        groups = 1 if group is None else inputs // group
        zero = meta(groups, outputs, dtype=torch.uint8) if zeros else None
        words, scale = meta(outputs, inputs * bits // 32), meta(groups, outputs, dtype=FLOAT)
        names = (meta(1, inputs), (outputs,)) if ordered else (None, ())
        return PackedWeight(words, scale, zero, bits, inputs, group, dtype, meta(MAX_TILES), *names)

    x, residual = (meta(tokens, HIDDEN, dtype=BF16) for _ in range(2))
    norm = meta(HIDDEN, dtype=BF16), 1e-5
    BACKEND.packed_linear(x, weight(6144, HIDDEN, torch.float16), meta(6144, dtype=torch.float16), norm=norm)
    gated = BACKEND.packed_gated_linear(x, weight(2 * INNER, HIDDEN), norm=norm)
    BACKEND.packed_linear(gated, weight(HIDDEN, INNER), residual_TN=residual)


def mix_experts(tokens: int, group: int | None = None, dtype: torch.dtype = BF16, held: range | None = None) -> None:
    """Compute Qwen3-30B-A3B's mixture of experts, or the experts `held` by a rank.

    Weights of 8 bits have scales of lines, or of `group` columns.
    """
    experts, size, columns = 128, 2048, 768
    count = experts if held is None else len(held)

    def weight(rows: int, width: int) -> Tensor | ScaledWeight:
        values = meta(rows, width, dtype=dtype)
        return (
            values if dtype == BF16 else ScaledWeight(values, meta(rows, width // (group or width), dtype=FLOAT), group)
        )

    x = meta(tokens, size, dtype=BF16)
    for normalize in (True, False):
        routing = BACKEND.select_experts(meta(tokens, experts, dtype=BF16), 8, normalize=normalize)
    copies = ExpertCopies(meta(experts, 5), experts + 16)
    BACKEND.select_experts(meta(tokens, experts, dtype=BF16), 8, normalize=True, copies=copies)
    weights = ExpertWeights(weight(count * 2 * columns, size), weight(count * size, columns), held)
    BACKEND.fused_experts(x, routing, weights)
    BACKEND.fused_experts(x, routing, weights, residual_TN=x)
    if dtype == BF16:
        routing = invariant_moe.select_experts(meta(tokens, experts, dtype=BF16), 8, normalize=True)
        invariant_moe.fused_experts(x, routing, weights, residual_TN=x)


def mix_packed_experts(tokens: int, bits: int, group: int | None, zeros: bool) -> None:
    """Compute Qwen3-30B-A3B's mixture of experts with packed integers."""
    experts, size, columns = 128, 2048, 768

    def weight(rows: int, width: int) -> PackedWeight:
        groups = 1 if group is None else width // group
        zero = meta(groups, rows, dtype=torch.uint8) if zeros else None
        words, scale = meta(rows, width * bits // 32), meta(groups, rows, dtype=FLOAT)
        return PackedWeight(words, scale, zero, bits, width, group, BF16, meta(MAX_TILES))

    routing = BACKEND.select_experts(meta(tokens, experts, dtype=BF16), 8, normalize=True)
    weights = ExpertWeights(weight(experts * 2 * columns, size), weight(experts * size, columns))
    BACKEND.fused_experts(meta(tokens, size, dtype=BF16), routing, weights)


class Ranks:
    """Two ranks' shards of the vocabulary, seen from rank 0."""

    rank, ranks, first = 0, 2, 0

    def __init__(self, exchange: Exchange | None) -> None:
        self.exchange = exchange

    def gather(self, x: Tensor) -> Tensor:
        return x.new_empty((self.ranks, *x.shape))


def exchange() -> Exchange:
    return Exchange.from_buffers([meta(Exchange.buffer_bytes(2), dtype=torch.uint8) for _ in range(2)], rank=0)


def sample(rows: int = 64, vocabulary: int = VOCABULARY, **options: Any) -> None:
    temperature, key = meta(rows, dtype=FLOAT), meta(rows, dtype=INT64)
    BACKEND.sample(meta(rows, vocabulary, dtype=BF16), SamplingBatch(temperature, key, key, key, **options))


def sample_with_edits() -> None:
    some = meta(8, dtype=INT64)
    contexts = Contexts(meta(SLOTS, PAGES), meta(SLOTS * PAGE, dtype=INT64), PAGE, some, some, some, 4096)
    factors = (meta(8, dtype=FLOAT) for _ in range(3))
    sample(penalties=Penalties(some, contexts, *factors), bias=LogitBias(some, some, meta(8, dtype=FLOAT)))


def advance_slots() -> None:
    columns = meta(4, SLOTS, dtype=INT64), meta(2, SLOTS), meta(5, SLOTS, dtype=FLOAT)
    column, token_of, end_ids = columns[0][1], meta(SLOTS * PAGE, dtype=INT64), meta(2, dtype=INT64)
    keys = column, column, columns[2][0]
    slots = SlotColumns(column, column, columns[1][0], column, meta(SLOTS, PAGES), token_of, end_ids, *keys, PAGE, 0)
    BACKEND.decode_rows(meta(32), slots)
    BACKEND.record_sampled_tokens(meta(32), meta(32, dtype=INT64), meta(32, dtype=FLOAT), slots)
    drafts, ngrams = DraftRows(*(meta(5, 32) for _ in range(3))), NgramTable.empty(column)
    draft_kn = BACKEND.draft_tokens(drafts, slots, ngrams)
    BACKEND.set_draft_slots(drafts, draft_kn, columns, slots)
    BACKEND.accept_drafts(drafts, draft_kn, meta(160), slots)
    BACKEND.learn_tokens(meta(32), meta(32), 5, slots, ngrams)
    BACKEND.predict_tokens(meta(32), 4, slots, ngrams)


def sum_over_ranks() -> None:
    x = meta(8, HIDDEN, dtype=BF16)
    one_shot_all_reduce(x, exchange().all_reduce)
    one_shot_all_reduce(x, exchange().all_reduce, residual=meta(8, HIDDEN, dtype=BF16))


def launch_all() -> None:
    """Launch every kernel with each value of its options, in combinations that a bfloat16 model uses.

    Options that guard separate statements, such as the head size and the cache's dtype, are not combined in full.
    """
    attend(128, rows=1024)
    attend(128, rows=4, max_kv=8192)
    attend(128, rows=2048, groups=8)
    attend(128, rows=64, groups=8, max_pack_rows=4)
    attend(128, rows=2048, groups=8, max_pack_rows=4)
    attend(128, chunks=(16, 512))
    attend(64, chunks=(16, 512), cache_dtype=FP8)
    attend(64, rows=4, max_kv=8192, cache_dtype=FP8, scaled=True)
    attend(64, rows=2048, chunks=(16, 512), groups=8, cache_dtype=FP8, scaled=True)
    attend(64, rows=2048, chunks=(1, 64), max_kv=8192, groups=8, window=4096)
    for head_dim, cache_dtype in ((64, FP8), (128, BF16)):
        rotate_and_write(head_dim, cache_dtype)
    rotate_and_write(64, FP8, scaled=True)
    for tokens in (1, 2, 16, 32, 64):
        project_and_write(tokens, BF16)
    project_and_write(1, FP8)
    project_and_write(16, FP8)
    read_and_write_int8(64)
    read_and_write_int8(128, torch.float16)
    for tokens in (1, 16, 64, 1024):
        multiply(tokens)
        multiply_8_bits(tokens, FP8)
    for tokens in (1, 1024):
        multiply_8_bits(tokens, FP8, group=128)
    for tokens in (16, 1024):
        multiply_8_bits(tokens, torch.int8)
    for tokens in (1, 5, 200):
        multiply_packed(tokens, 4, 128, zeros=True)
    for tokens in (1, 16):
        multiply_packed(tokens, 4, 32, zeros=False)
        multiply_packed(tokens, 8, None, zeros=True)
    multiply_packed(8192, 4, 128, zeros=True, ordered=True)
    for tokens in (16, 1024, 8192):
        mix_experts(tokens)
    for group in (None, 128):
        mix_experts(16, group, FP8)
        mix_experts(16, group, FP8, range(48, 64))
    for tokens in (1, 256, 8192):
        mix_experts(tokens, held=range(48, 64))
    mix_experts(8192, None, torch.int8)
    for zeros in (True, False):
        mix_packed_experts(16, 4, 128, zeros)
    mix_packed_experts(16, 8, None, zeros=True)
    mix_packed_experts(256, 4, 32, zeros=True)
    mix_packed_experts(8192, 4, 128, zeros=True)
    sample()
    sample(all_greedy=True)
    sample(masks=Masks(meta(8, dtype=INT64), meta(8, dtype=INT64), meta(1, VOCABULARY // 32)))
    sample(filters=Filters(meta(8, dtype=INT64), meta(8), meta(8, dtype=FLOAT), meta(8, dtype=FLOAT)))
    sample_with_edits()
    sample(processed=True)
    sample(filters=Filters(meta(8, dtype=INT64), meta(8), meta(8, dtype=FLOAT), meta(8, dtype=FLOAT)), processed=True)
    for exchanged in (None, exchange()):
        for processed in (False, True):
            sample(vocabulary=VOCABULARY // 2, shards=Ranks(exchanged), processed=processed)
    advance_slots()
    sum_over_ranks()


def name_of(kernel: Any) -> str:
    name: str = f"{kernel.fn.__module__}.{kernel.fn.__name__}".removeprefix("tok_kernels.")
    return name


def launched_in_sources() -> Iterator[Any]:
    """Yield every kernel that a module of tok_kernels launches, as in `kernel[grid](...)`."""
    for found in pkgutil.walk_packages(tok_kernels.__path__, "tok_kernels."):
        module = importlib.import_module(found.name)
        for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
                kernel = getattr(module, node.value.id, None)
                if isinstance(kernel, JITFunction):
                    yield kernel


LAUNCHED = {name_of(kernel): kernel for kernel in launched_in_sources()}


def facts(variant: Variant) -> set[object]:
    """Return each value of a variant's constants and options, and each pair of values on which its source may branch.

    Sources branch on arguments' types, on flags, and on whether a number is zero.
    """
    _, signature, _, constants, options, *_ = variant.arguments
    names = list(signature)
    values = {(names[path[0]], *path[1:]): value for path, value in constants.items()}
    branches = {(name, kind) for name, kind in signature.items() if kind != "constexpr"}
    branches |= {(name, value != 0 if isinstance(value, int | float) else value) for name, value in values.items()}
    chosen = {(name, getattr(options, name)) for name in ("num_warps", "num_stages", "maxnreg")}
    return {*values.items(), *chosen, *map(frozenset, combinations(branches, 2))}


def covering(variants: list[Variant]) -> Iterator[Variant]:
    """Yield variants of a kernel that have all facts of all of them; each next one adds the most."""
    left = [(variant, facts(variant)) for variant in variants]
    missing = set[object]().union(*(found for _, found in left))
    while missing:
        variant, found = max(left, key=lambda one: len(one[1] & missing))
        missing -= found
        yield variant


def compile_for(capability: int, launch: Callable[[], None], cache: Path) -> Mapping[str, list[Any]]:
    """Return, by kernel, what was compiled for GPUs of a compute capability, or the error that compiling raised.

    Of the variants that are launched, those are compiled that have the facts of all.
    """
    variants: dict[str, dict[str, Variant]] = defaultdict(dict)
    do_compile = JITFunction._do_compile

    def note(kernel: Any, *arguments: Any) -> None:
        variants[name_of(kernel)].setdefault(arguments[0], Variant(kernel, arguments))

    def compiled(variant: Variant) -> Any:
        try:
            return do_compile(variant.kernel, *variant.arguments)
        except Exception as error:
            return error

    # Triton keeps compiled kernels by device; no real device has a negative number.
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: -capability,
        get_current_stream=lambda device: 0,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(cache))
        patch.setattr(triton.runtime.driver, "_active", driver)
        patch.setattr(JITFunction, "_do_compile", note)
        patch.setattr(launch_config, "supports_pdl", lambda device: capability >= 90)
        launch()
        return {name: [compiled(one) for one in covering([*found.values()])] for name, found in variants.items()}


def check(results: list[Any], target: str) -> None:
    for result in results:
        if isinstance(result, Exception):
            raise result
        assert f".target {target}" in result.asm["ptx"]
        assert result.asm["cubin"].startswith(b"\x7fELF")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[Any]]:
    return compile_for(90, launch_all, tmp_path_factory.mktemp("triton"))


def test_every_launched_kernel_has_a_case(compiled: Mapping[str, list[Any]]) -> None:
    assert compiled.keys() == LAUNCHED.keys()


@pytest.mark.parametrize("kernel", LAUNCHED)
def test_kernel_compiles_for_sm_90(kernel: str, compiled: Mapping[str, list[Any]]) -> None:
    check(compiled[kernel], "sm_90a")


@pytest.mark.parametrize("kernel", LAUNCHED)
def test_tensor_cores_read_no_register_that_is_overwritten(kernel: str, compiled: Mapping[str, list[Any]]) -> None:
    for result in compiled[kernel]:
        ttgir = result.asm["ttgir"]
        if re.search(r"ttng\.warp_group_dot .*opIdx = 0", ttgir):  # the first operand is in registers
            assert {*re.findall(r"ttng\.warp_group_dot_wait .*pendings = (\d+)", ttgir)} == {"0"}


def test_kernels_of_an_int8_cache_compile_for_gpus_without_float8(tmp_path: Path) -> None:
    for results in compile_for(80, lambda: read_and_write_int8(64), tmp_path).values():
        check(results, "sm_80")


@pytest.mark.parametrize("kernel", LAUNCHED)
def test_arguments_that_must_not_recompile_a_kernel_exist(kernel: str) -> None:
    function = LAUNCHED[kernel]
    assert {*function.do_not_specialize, *function.do_not_specialize_on_alignment} <= set(function.arg_names)

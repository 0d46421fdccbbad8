"""Choose launch configurations of the kernels of linear layers, from tables measured on an H200.

Three kernels multiply a dense or 8-bit weight, by the number of tokens: a GEMV for one or two, the few-row GEMM
(skinny GEMM) for up to 64, and cuBLAS for more. Packed weights have a GEMV and a GEMM kernel that unpack them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tok_kernels.launch_config import power_of_two
from tok_kernels.linear.quantized_weights import PackedWeight

# Maximum tokens of the GEMV kernel. For more, the few-row GEMM is faster, since it uses tensor cores.
MAX_GEMV_TOKENS = 2
_MAX_8_BIT_GEMV_TOKENS = 1
# Maximum tokens of the few-row GEMM, which reads the weight once. For more, cuBLAS is as fast or faster.
MAX_FEW_ROWS = 64
MAX_SPLIT_PROGRAMS = 132  # SMs of a Hopper GPU; split-K divides weights of fewer tiles
VECTOR = 8  # 16-bit elements that a thread loads at once; cuBLAS computes weights whose inputs are no multiple of it
_MIN_BLOCK_K = 64


@dataclass(frozen=True, slots=True)
class GemvLaunch:
    """Launch configuration of the GEMV kernel for one token or two.

    block_n  output features of a program
    block_k  input features that a program reads at a time
    warps    Triton's num_warps
    vector   products that a thread sums before it adds them to its accumulators
    """

    block_n: int
    block_k: int
    warps: int
    vector: int = VECTOR


@dataclass(frozen=True, slots=True)
class FewRowsLaunch:
    """Launch configuration of the few-row GEMM.

    block_n   weight rows of a program; half of them are gates in a gated GEMM
    block_k   input features that a program reads at a time
    warps     Triton's num_warps
    stages    Triton's num_stages
    block_m   tokens of a program
    splits    programs that share the input features of a tile (split-K)
    prefetch  input features whose weights are prefetched into the L2 cache before the predecessor ends; 0: none
    """

    block_n: int
    block_k: int
    warps: int
    stages: int
    block_m: int = 16
    splits: int = 1
    prefetch: int = 0


# (maximum outputs, maximum inputs, launch); the first entry that fits applies. A gated GEMM reads two weight rows for
# each output.
_ANY = 2**31
_GEMV = (
    (_ANY, 4096, GemvLaunch(4, 1024, 4)),
    (2560, _ANY, GemvLaunch(4, 2048, 8)),
    (_ANY, _ANY, GemvLaunch(8, 2048, 8)),
)
_GATED_GEMV = ((_ANY, 2048, GemvLaunch(2, 1024, 4)), (_ANY, _ANY, GemvLaunch(2, 2048, 8)))
_TWO_TOKENS, _GATED_TWO_TOKENS = GemvLaunch(4, 1024, 4), GemvLaunch(2, 1024, 4)

# Launches of the batch-invariant few-row GEMM of 16-bit weights. With a small block_n, few outputs fill the GPU, too.
_MAX_INVARIANT_TOKENS = 16  # for more, cuBLASLt without split-K is as fast or faster, except for deep weights
_MAX_DEEP_INVARIANT_TOKENS = 64  # with a weight of at least `_DEEP` times as many inputs as outputs
_DEEP = 4
_INVARIANT, _INVARIANT_GATED = FewRowsLaunch(64, 256, 4, 4), FewRowsLaunch(128, 128, 4, 4)
_INVARIANT_FEW_OUTPUTS, _MAX_FEW_OUTPUTS = FewRowsLaunch(16, 512, 2, 4), 4096

# Launches of the few-row GEMM by the maximum number of tokens. All but the last use so much shared memory that an SM
# holds a single program, which spreads programs that start early evenly: with 5 stages instead of 6, the GEMMs of a
# layer of Llama-3.2-1B take 56 µs for 4 tokens instead of 51 (H100). Weights of many rows have larger tiles: with tiles
# of 64 rows, a layer of Llama-3.2-1B takes 51.6 µs for 8 tokens instead of 50.9, and one of Llama-3.1-8B 128.1 instead
# of 127.4, and 147.0 instead of 144.0 for 32 tokens (H200).
_FEW_ROWS = (
    (16, FewRowsLaunch(64, 128, 4, 6, 16, prefetch=256)),
    (32, FewRowsLaunch(64, 128, 4, 5, 32, prefetch=256)),
    (64, FewRowsLaunch(128, 128, 8, 3, 64, prefetch=256)),
)
_FEW_ROWS_WIDE = (
    (16, FewRowsLaunch(128, 128, 8, 5, 16, prefetch=256)),
    (32, FewRowsLaunch(128, 128, 8, 4, 32, prefetch=256)),
    (64, FewRowsLaunch(128, 128, 8, 3, 64, prefetch=256)),
)
_MAX_SPLITS = 8
_WIDE = 16384  # weight rows
_MAX_NARROW_TOKENS = 32  # for more tokens, cuBLAS is faster with weights of less than `_WIDE` rows

# Launches of the few-row GEMM of 8-bit weights. On an H200, the smaller tiles of wide weights take 1.0 µs less for 8
# tokens (a layer of Llama-3.1-8B). Deep weights that are divided and prefetched take 1.4 µs less for 8 tokens, and
# 2.0 µs less for 32 (Llama-3.2-1B).
_8_BIT, _8_BIT_WIDE = FewRowsLaunch(64, 256, 4, 6), FewRowsLaunch(128, 256, 4, 4)
_8_BIT_WIDE_16_TOKENS = FewRowsLaunch(64, 128, 4, 8, prefetch=512)
_8_BIT_DEEP, _MIN_DEEP_INPUTS, _MAX_DEEP_TOKENS = FewRowsLaunch(64, 256, 4, 8, prefetch=512), 8192, 32
_OTHER_SHARED_BYTES = 3 << 10  # at most, beside the stages


def gemv_launch(tokens: int, outputs: int, inputs: int, *, gated: bool) -> GemvLaunch:
    """Return the launch of the GEMV kernel for `outputs` and `inputs` features; block_k is no larger than they need."""
    table = _GATED_GEMV if gated else _GEMV
    launch = next(launch for max_n, max_k, launch in table if outputs <= max_n and inputs <= max_k)
    if tokens > 1:
        launch = _GATED_TWO_TOKENS if gated else _TWO_TOKENS
    if gated:
        # In a gated GEMM, padding of the last block costs more than smaller blocks do.
        divisor = min((1, 2, 4), key=lambda divisor: -inputs % (launch.block_k // divisor))
        launch = replace(launch, block_k=launch.block_k // divisor, warps=launch.warps // divisor)
    return replace(launch, block_k=max(min(launch.block_k, power_of_two(inputs)), _MIN_BLOCK_K))


def use_gemv(tokens: int, inputs: int, *, bits: int = 16) -> bool:
    """Return whether the GEMV kernel (`triton_gemv`) computes a layer of this size with a weight of 16 or 8 bits."""
    max_tokens = MAX_GEMV_TOKENS if bits == 16 else _MAX_8_BIT_GEMV_TOKENS
    return 0 < tokens <= max_tokens and inputs > 0 and inputs % VECTOR == 0


def use_invariant_few_row_gemm(tokens: int, outputs: int, inputs: int) -> bool:
    """Return whether the few-row GEMM computes a batch-invariant GEMM of this size; otherwise cuBLASLt does.

    With a single output (the gate of a shared expert), some of cuBLASLt's results depend on the number of rows: they
    have other bits among 4,095 rows than among 4,096.
    """
    if outputs < VECTOR:
        return tokens > 0
    return 0 < tokens <= (_MAX_DEEP_INVARIANT_TOKENS if inputs >= _DEEP * outputs else _MAX_INVARIANT_TOKENS)


def few_rows_launch(tokens: int, weight_rows: int, inputs: int) -> FewRowsLaunch:
    """Return the launch of the few-row GEMM for a 16-bit weight of `weight_rows` rows and `inputs` columns.

    For weights of few rows, split-K divides the inputs among programs until these fill the GPU.
    """
    table = _FEW_ROWS_WIDE if weight_rows >= _WIDE else _FEW_ROWS
    launch = next(launch for max_tokens, launch in table if tokens <= max_tokens)
    return _split(_fitted(launch, inputs), weight_rows, inputs)


def scaled_few_rows_launch(tokens: int, weight_rows: int, inputs: int, shared_bytes: int) -> FewRowsLaunch:
    """Return the launch of the few-row GEMM for an 8-bit weight of `weight_rows` rows and `inputs` columns.

    It has as many of its stages as fit in `shared_bytes`, the largest shared memory of a program.
    """
    block_m = next(max_tokens for max_tokens, _ in _FEW_ROWS if tokens <= max_tokens)
    if weight_rows >= _WIDE:
        launch = _8_BIT_WIDE_16_TOKENS if block_m == 16 else _8_BIT_WIDE
    elif inputs >= _MIN_DEEP_INPUTS and tokens <= _MAX_DEEP_TOKENS:
        launch = _split(_8_BIT_DEEP, weight_rows, inputs)
    else:
        launch = _8_BIT
    launch = replace(_fitted(launch, inputs), block_m=block_m)
    stage_bytes = (launch.block_n + block_m) * launch.block_k
    return replace(launch, stages=min(launch.stages, (shared_bytes - _OTHER_SHARED_BYTES) // stage_bytes))


def _fitted(launch: FewRowsLaunch, inputs: int) -> FewRowsLaunch:
    """Return the launch with a block_k no larger than the inputs need."""
    return replace(launch, block_k=max(min(launch.block_k, power_of_two(inputs)), _MIN_BLOCK_K))


def _split(launch: FewRowsLaunch, weight_rows: int, inputs: int) -> FewRowsLaunch:
    """Return the launch with as many splits as fill the GPU, if its tiles do not."""
    splits = min(MAX_SPLIT_PROGRAMS // -(-weight_rows // launch.block_n), -(-inputs // launch.block_k), _MAX_SPLITS)
    return replace(launch, splits=max(1, splits))


def use_few_row_gemm(tokens: int, weight_rows: int, inputs: int) -> bool:
    """Return whether the few-row GEMM computes a 16-bit GEMM of this size; otherwise cuBLAS does."""
    fits = 0 < tokens <= (MAX_FEW_ROWS if weight_rows >= _WIDE else _MAX_NARROW_TOKENS)
    return fits and inputs > 0 and inputs % VECTOR == 0


def invariant_few_row_launch(outputs: int, inputs: int, *, gated: bool) -> FewRowsLaunch:
    """Return the launch of the batch-invariant few-row GEMM, which never uses split-K."""
    launch = _INVARIANT_GATED if gated else _INVARIANT_FEW_OUTPUTS if outputs <= _MAX_FEW_OUTPUTS else _INVARIANT
    return _fitted(launch, inputs)


def scaled_gemv_launch(inputs: int, *, gated: bool) -> GemvLaunch:
    """Return the launch of the GEMV kernel for an 8-bit weight with `inputs` columns.

    On an H200, those of gated and of deep weights take 1.5 and 1.4 µs less for a layer of Llama-3.1-8B than the last
    launch; 16 outputs of a gated weight 0.6 µs less than blocks of 1,024 columns with Llama-3.2-1B.
    """
    if gated and inputs >= 512:
        return GemvLaunch(16 if inputs <= 2048 else 8, 512, 4, vector=16)
    if inputs > 8192:
        return GemvLaunch(4, 2048, 4, vector=16) if inputs % 2048 == 0 else GemvLaunch(8, 1024, 4)
    block_k = max(min(4096 if inputs % 2048 or inputs > 2048 else 2048, power_of_two(inputs)), _MIN_BLOCK_K)
    return GemvLaunch(4, block_k, 4, vector=16)


@dataclass(frozen=True, slots=True)
class PackedGemvLaunch:
    """Launch configuration of the GEMV kernel of packed weights, for one token.

    block_n  output features of a program
    block_k  input features that a program reads at a time
    warps    Triton's num_warps
    """

    block_n: int
    block_k: int
    warps: int


@dataclass(frozen=True, slots=True)
class PackedGemmLaunch:
    """Launch configuration of the GEMM kernel of packed weights.

    block_n  weight rows of a program
    block_m  tokens of a program
    block_k  input features that a program reads at a time; they share a scale
    splits   programs that share the input features of a tile (split-K)
    warps    Triton's num_warps
    stages   Triton's num_stages
    """

    block_n: int
    block_m: int
    block_k: int
    splits: int
    warps: int
    stages: int


# Maximum tokens of the GEMM kernel. For more, W is dequantised for cuBLAS, which takes 203 µs per layer of Llama-3.1-8B
# in addition to the GEMMs. With symmetric 4-bit groups both take equally long at 450 tokens, between the measured 256
# and 512. With zero points of groups, tiles that are not split take 112 µs at 128 tokens and 219 at 256 (28672 × 4096);
# cuBLAS takes 157 and 178.
MAX_SYMMETRIC_TOKENS, MAX_PACKED_GEMM_TOKENS, MAX_ZERO_POINT_TOKENS = 448, 256, 128
_MAX_BLOCK_M = 128
_MIN_GEMV_BLOCK_K, _MAX_GEMV_BLOCK_K = 128, 4096
_BLOCK_N, _BLOCK_K = 128, 128
_MAX_PROGRAMS, _MAX_LARGE_PROGRAMS = 384, 264  # up to which tiles are split, for a block_m of 16 and for larger ones


def packed_gemv_launch(columns: int) -> PackedGemvLaunch:
    """Return the launch for one token and a weight of `columns`; padding costs less than a second block."""
    max_block_k = _MAX_GEMV_BLOCK_K if columns <= _MAX_GEMV_BLOCK_K else _MAX_GEMV_BLOCK_K // 2
    return PackedGemvLaunch(8, max(_MIN_GEMV_BLOCK_K, min(power_of_two(columns), max_block_k)), 4)


def packed_gemm_launch(tokens: int, weight: PackedWeight) -> PackedGemmLaunch | None:
    """Return the launch for several tokens; None: cuBLAS with the dequantised weight is faster.

    Measured on an H200 with weights of 28672 × 4096 and 4096 × 14336. Two programs with tiles of 64 tokens share a
    multiprocessor: one unpacks weights while the other waits for its product. With zero points that is slower for tiles
    that are not split; 8-bit weights, and those with one scale per row, are treated alike.
    """
    grouped_zeros = weight.group is not None and weight.zero_GF is not None
    symmetric = weight.bits == 4 and weight.group is not None and weight.zero_GF is None
    if tokens > (MAX_SYMMETRIC_TOKENS if symmetric else MAX_PACKED_GEMM_TOKENS):
        return None
    rows, columns = weight.shape
    group = weight.group or _BLOCK_K
    block_k = min(_BLOCK_K, group & -group)

    def splits(block_m: int) -> int:
        tiles = -(-rows // _BLOCK_N) * -(-tokens // block_m)
        max_programs = _MAX_PROGRAMS if block_m == 16 else _MAX_LARGE_PROGRAMS
        return max(1, min(max_programs // tiles, columns // block_k // 2))

    if tokens > 32 and (symmetric or splits(64) > 1):
        return PackedGemmLaunch(_BLOCK_N, 64, block_k, splits(64), 4 if splits(64) > 1 else 8, 4)
    if tokens > MAX_ZERO_POINT_TOKENS and grouped_zeros:
        return None
    block_m = max(16, min(_MAX_BLOCK_M, power_of_two(tokens)))
    return PackedGemmLaunch(_BLOCK_N, block_m, block_k, splits(block_m), 8 if block_m == _MAX_BLOCK_M else 4, 3)

"""Choose launch configurations of the kernels of linear layers, from tables measured on an H200."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tok_kernels.launch_config import power_of_two
from tok_kernels.linear.quantized_weights import PackedWeight

# Maximum tokens for the GEMV kernel. For more, the few-row GEMM is faster, since it uses tensor cores.
MAX_GEMV_TOKENS = 2
_MAX_8_BIT_GEMV_TOKENS = 1
# Maximum tokens for the few-row GEMM, which reads the weight once. For more, cuBLAS is as fast or faster.
MAX_FEW_ROWS = 64
MAX_SPLIT_PROGRAMS = 132  # multiprocessors of a Hopper GPU; weights of fewer tiles are divided along their inputs
VECTOR = 8  # elements of 16 bits that a thread loads at once; torch computes other inputs than multiples of it
_MIN_BLOCK = 64  # inputs


@dataclass(frozen=True, slots=True)
class LinearLaunch:
    """Launch configuration of the GEMV kernel for one token or two.

    rows    outputs of a program
    block   inputs that it reads at a time
    warps   Triton's num_warps
    vector  elements that a thread adds up before it adds them to its sums
    """

    rows: int
    block: int
    warps: int
    vector: int = VECTOR


@dataclass(frozen=True, slots=True)
class FewRowsLaunch:
    """Launch configuration of the tensor-core kernel for few tokens.

    lines     rows of the weight of a program; of a gated GEMM, one half are gates
    block     inputs that it reads at a time
    warps     Triton's num_warps
    stages    Triton's num_stages
    tokens    tokens of a program
    splits    programs that divide the inputs of a tile (split-K)
    prefetch  inputs whose weights are read into the L2 cache before the predecessor ends; 0: none
    """

    lines: int
    block: int
    warps: int
    stages: int
    tokens: int = 16
    splits: int = 1
    prefetch: int = 0


# (maximum outputs, maximum inputs, launch); the first entry that fits applies. A gated GEMM reads two rows of weights
# for each output.
_ANY = 2**31
_PLAIN = (
    (_ANY, 4096, LinearLaunch(4, 1024, 4)),
    (2560, _ANY, LinearLaunch(4, 2048, 8)),
    (_ANY, _ANY, LinearLaunch(8, 2048, 8)),
)
_GATED = ((_ANY, 2048, LinearLaunch(2, 1024, 4)), (_ANY, _ANY, LinearLaunch(2, 2048, 8)))
_TWO_TOKENS, _TWO_TOKENS_GATED = LinearLaunch(4, 1024, 4), LinearLaunch(2, 1024, 4)


# Launches of batch-invariant GEMMs of few tokens in 16 bits. Programs of few outputs fill the GPU if outputs are few.
_MAX_INVARIANT_TOKENS = 16  # for more, cuBLASLt without split-K is as fast or faster, except for long weights
_MAX_LONG_INVARIANT_TOKENS = 64  # with a weight of at least `_LONG` times as many inputs as outputs
_LONG = 4
_INVARIANT, _INVARIANT_GATED = FewRowsLaunch(64, 256, 4, 4), FewRowsLaunch(128, 128, 4, 4)
_INVARIANT_FEW_OUTPUTS, _MAX_FEW_OUTPUTS = FewRowsLaunch(16, 512, 2, 4), 4096

# Launches of the few-row GEMM by the maximum number of tokens, measured on an H100. Of the first two, a single
# program fits a multiprocessor, so that programs that start early are spread evenly: with 5 stages for 6, the GEMMs of
# a layer of Llama-3.2-1B take 56 µs for 4 tokens instead of 51.
_FEW_ROWS = (
    (16, FewRowsLaunch(64, 128, 4, 6, 16, prefetch=256)),
    (32, FewRowsLaunch(64, 128, 4, 5, 32, prefetch=256)),
    (64, FewRowsLaunch(128, 128, 8, 3, 64, prefetch=256)),
)
_FEW_ROWS_8_BITS, _FEW_ROWS_8_BITS_WIDE = FewRowsLaunch(64, 256, 4, 6), FewRowsLaunch(128, 256, 4, 4)
_MAX_SPLITS = 8
_MAX_NARROW_TOKENS, _WIDE = 32, 16384  # for more tokens, cuBLAS is faster for weights of fewer rows


def linear_launch(tokens: int, outputs: int, inputs: int, *, gated: bool) -> LinearLaunch:
    """Return the launch for a weight of `outputs` rows and `inputs` columns; blocks are no wider than inputs need."""
    table = _GATED if gated else _PLAIN
    launch = next(launch for most, widest, launch in table if outputs <= most and inputs <= widest)
    if tokens > 1:
        launch = _TWO_TOKENS_GATED if gated else _TWO_TOKENS
    if gated:
        # In a gated GEMM, columns past the end cost more than smaller blocks do.
        part = min((1, 2, 4), key=lambda part: -inputs % (launch.block // part))
        launch = replace(launch, block=launch.block // part, warps=launch.warps // part)
    return replace(launch, block=max(min(launch.block, power_of_two(inputs)), _MIN_BLOCK))


def use_gemv(tokens: int, inputs: int, *, bits: int = 16) -> bool:
    """Return whether the GEMV kernel (`triton_stream`) computes a GEMM of this size with a weight of 16 or 8 bits."""
    most = MAX_GEMV_TOKENS if bits == 16 else _MAX_8_BIT_GEMV_TOKENS
    return 0 < tokens <= most and inputs > 0 and inputs % VECTOR == 0


def use_invariant_few_row_gemm(tokens: int, outputs: int, inputs: int) -> bool:
    """Return whether the few-row GEMM computes a batch-invariant GEMM of this size; otherwise cuBLASLt does.

    With a single output, cuBLASLt gave some rows other bits among 4,095 than among 4,096 (the gate of a shared expert).
    """
    if outputs < VECTOR:
        return tokens > 0
    return 0 < tokens <= (_MAX_LONG_INVARIANT_TOKENS if inputs >= _LONG * outputs else _MAX_INVARIANT_TOKENS)


def few_rows_launch(tokens: int, lines: int, inputs: int, *, bits: int = 16) -> FewRowsLaunch:
    """Return the launch of the few-row GEMM for a weight of `lines` rows and `inputs` columns.

    With 16 bits and few outputs, split-K divides the inputs among programs until they fill the GPU.
    """
    launch = next(launch for most, launch in _FEW_ROWS if tokens <= most)
    if bits == 8:
        launch = replace(_FEW_ROWS_8_BITS_WIDE if lines >= _WIDE else _FEW_ROWS_8_BITS, tokens=launch.tokens)
    launch = replace(launch, block=max(min(launch.block, power_of_two(inputs)), _MIN_BLOCK))
    if bits == 8:
        return launch
    splits = min(MAX_SPLIT_PROGRAMS // -(-lines // launch.lines), -(-inputs // launch.block), _MAX_SPLITS)
    return replace(launch, splits=max(1, splits))


def use_few_row_gemm(tokens: int, lines: int, inputs: int) -> bool:
    """Return whether the few-row GEMM computes a 16-bit GEMM of this size; otherwise torch does."""
    fits = 0 < tokens <= (MAX_FEW_ROWS if lines >= _WIDE else _MAX_NARROW_TOKENS)
    return fits and inputs > 0 and inputs % VECTOR == 0


def invariant_few_row_launch(outputs: int, inputs: int, *, gated: bool) -> FewRowsLaunch:
    """Return the launch of the batch-invariant few-row GEMM, which never uses split-K."""
    launch = _INVARIANT_GATED if gated else _INVARIANT_FEW_OUTPUTS if outputs <= _MAX_FEW_OUTPUTS else _INVARIANT
    return replace(launch, block=max(min(launch.block, power_of_two(inputs)), _MIN_BLOCK))


def scaled_stream_launch(inputs: int) -> LinearLaunch:
    """Return the launch of the fused kernel for a weight of 8 bits with `inputs` columns."""
    if inputs > 8192:
        return LinearLaunch(8, 1024, 4)
    block = max(min(4096 if inputs % 2048 or inputs > 2048 else 2048, power_of_two(inputs)), _MIN_BLOCK)
    return LinearLaunch(4, block, 4, vector=16)


@dataclass(frozen=True, slots=True)
class PackedStreamLaunch:
    """Launch configuration of the kernel for one token.

    rows   outputs of a program
    block  inputs that it reads at a time
    warps  Triton's num_warps
    """

    rows: int
    block: int
    warps: int


@dataclass(frozen=True, slots=True)
class PackedDotLaunch:
    """Launch configuration of the kernel with tensor cores.

    lines     rows of the weight of a program
    tokens    tokens of a program
    block     inputs that it reads at a time; they share a scale
    splits    programs that divide the inputs of a tile (split-K)
    warps     Triton's num_warps
    stages    Triton's num_stages
    scaled    scales are applied to the weights, which are then rounded; else to the sums
    """

    lines: int
    tokens: int
    block: int
    splits: int
    warps: int
    stages: int
    scaled: bool = False


# Maximum tokens for the kernel with tensor cores. For more, W is dequantised for torch's GEMM, which for one layer of
# Llama-3.1-8B takes 203 µs more than the GEMMs. Measured up to 32 tokens; the maximum is an estimate.
MAX_DOT_TOKENS = 256
_MAX_TILE_TOKENS = 128
_STREAM_BLOCKS = (128, 4096)  # least and most columns; some more than there are cost less than another pass
_LINES, _BLOCK = 128, 128
_MAX_PROGRAMS, _MAX_WIDE_PROGRAMS = 384, 264  # of up to 16 tokens, of more; splits make no more of them


def packed_stream_launch(columns: int) -> PackedStreamLaunch:
    """Return the launch for one token and a weight of `columns`."""
    least, most = _STREAM_BLOCKS
    return PackedStreamLaunch(8, max(least, min(power_of_two(columns), most if columns <= most else most // 2)), 4)


def packed_dot_launch(tokens: int, weight: PackedWeight) -> PackedDotLaunch | None:
    """Return the launch for several tokens; None: torch's GEMM of the dequantised weight is faster."""
    if tokens > MAX_DOT_TOKENS:
        return None
    rows, columns = weight.shape
    group = weight.group or _BLOCK
    block, width = min(_BLOCK, group & -group), max(16, min(_MAX_TILE_TOKENS, power_of_two(tokens)))
    tiles = -(-rows // _LINES) * -(-tokens // width)
    splits = max(1, min((_MAX_PROGRAMS if width == 16 else _MAX_WIDE_PROGRAMS) // tiles, columns // block // 2))
    return PackedDotLaunch(_LINES, width, block, splits, 8 if width == _MAX_TILE_TOKENS else 4, 3)

"""Choose launch configurations of the kernels of packed weights, from tables measured on an H200."""

from __future__ import annotations

from dataclasses import dataclass

from tok_kernels.launch_config import power_of_two
from tok_kernels.linear.packed_weight import PackedWeight


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
    splits    parts that the inputs are cut into, each with programs of its own
    warps     Triton's num_warps
    stages    Triton's num_stages
    scaled    scales are applied to weights, which are rounded then, rather than to sums of products
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

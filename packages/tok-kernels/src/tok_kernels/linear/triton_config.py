"""Choose launch configurations of GEMMs for few tokens from a table by outputs and inputs, measured on an H200."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tok_kernels.launch_config import power_of_two

# With more tokens torch's GEMM, on tensor cores, is as fast or faster.
MAX_STREAM_TOKENS = 1
# Elements that a thread loads at once (torch computes inputs that are no multiple of it), and the smallest block.
_VECTOR, _LEAST = 8, 64


@dataclass(frozen=True, slots=True)
class LinearLaunch:
    """Launch configuration: `rows` outputs a program, `block` inputs at a time, and Triton's num_warps."""

    rows: int
    block: int
    warps: int


# (most outputs, most inputs, launch); the first that fits applies. A gated GEMM reads two rows of weights per output.
_ANY = 2**31
_PLAIN = (
    (_ANY, 4096, LinearLaunch(4, 1024, 4)),
    (2560, _ANY, LinearLaunch(4, 2048, 8)),
    (_ANY, _ANY, LinearLaunch(8, 2048, 8)),
)
_GATED = ((_ANY, 2048, LinearLaunch(2, 1024, 4)), (_ANY, _ANY, LinearLaunch(2, 2048, 8)))


def linear_launch(outputs: int, inputs: int, *, gated: bool) -> LinearLaunch:
    """Return the launch for a GEMM of `inputs` by `outputs`; a block is no wider than the inputs need."""
    table = _GATED if gated else _PLAIN
    launch = next(launch for most, widest, launch in table if outputs <= most and inputs <= widest)
    if gated:
        # In a gated GEMM, columns past the end cost more than narrow blocks do.
        part = min((1, 2, 4), key=lambda part: -inputs % (launch.block // part))
        launch = replace(launch, block=launch.block // part, warps=launch.warps // part)
    return replace(launch, block=max(min(launch.block, power_of_two(inputs)), _LEAST))


def streams(tokens: int, inputs: int) -> bool:
    """Return whether the kernel for few tokens computes a GEMM of this size; otherwise torch does."""
    return 0 < tokens <= MAX_STREAM_TOKENS and inputs > 0 and inputs % _VECTOR == 0

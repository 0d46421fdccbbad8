"""How products for few tokens are launched: a table by outputs and inputs, measured on an H200."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tok_kernels.launch_config import power_of_two

# With more tokens torch's product, on tensor cores, is as fast or faster.
MAX_STREAM_TOKENS = 1
# What a thread copies at once, so that other numbers of inputs are torch's; and the smallest block.
_VECTOR, _LEAST = 8, 64


@dataclass(frozen=True, slots=True)
class LinearLaunch:
    """`rows` outputs a program, `block` inputs at a time; Triton's warps."""

    rows: int
    block: int
    warps: int


# (most outputs, most inputs, launch), the first that fits. A gated product reads two rows of weights an output.
_ANY = 2**31
_PLAIN = (
    (_ANY, 4096, LinearLaunch(4, 1024, 4)),
    (2560, _ANY, LinearLaunch(4, 2048, 8)),
    (_ANY, _ANY, LinearLaunch(8, 2048, 8)),
)
_GATED = ((_ANY, 2048, LinearLaunch(2, 1024, 4)), (_ANY, _ANY, LinearLaunch(2, 2048, 8)))


def linear_launch(outputs: int, inputs: int, *, gated: bool) -> LinearLaunch:
    """For a product of `inputs` by `outputs`; a block is no wider than the inputs need."""
    table = _GATED if gated else _PLAIN
    launch = next(launch for most, widest, launch in table if outputs <= most and inputs <= widest)
    if gated:
        # Columns past the end cost more here than narrow blocks do.
        part = min((1, 2, 4), key=lambda part: -inputs % (launch.block // part))
        launch = replace(launch, block=launch.block // part, warps=launch.warps // part)
    return replace(launch, block=max(min(launch.block, power_of_two(inputs)), _LEAST))


def streams(tokens: int, inputs: int) -> bool:
    """Whether the kernel for few tokens takes a product of this size; otherwise torch's does."""
    return 0 < tokens <= MAX_STREAM_TOKENS and inputs > 0 and inputs % _VECTOR == 0

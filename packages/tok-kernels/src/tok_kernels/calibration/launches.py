"""Search for the fastest launch configuration of a Triton kernel on this device, among a few."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tok_kernels import launch_config as config
from tok_kernels.attention.interface import AttentionShape, PhaseKernel
from tok_kernels.attention.triton.attention import triton_decode_kernel, triton_prefill_kernel
from tok_kernels.launch_config import AttentionLaunch, Kernel, KernelName
from tok_kernels.measure.steps import AttentionProblem, AttentionStep
from tok_kernels.measure.timing import TimedWork, Timer

# Steps on which each kernel's launches are tried: "decode", "split" (few rows, split-KV) and "tile".
_ROWS = (AttentionStep(rows=1024, own=640), AttentionStep(rows=64, own=2048))
_FEW_ROWS = (AttentionStep(rows=32, own=640), AttentionStep(rows=4, own=2048))
_TILES = (AttentionStep(chunks=((512, 0),) * 16), AttentionStep(rows=2048, own=16, groups=16, prefix=704))


@dataclass(frozen=True, slots=True)
class Search:
    """The launch configurations of `kernel` to try, and the steps to try them on."""

    kernel: Kernel
    launches: Sequence[AttentionLaunch]
    steps: Sequence[AttentionStep]

    def best(self, new_problem: Callable[[AttentionStep], AttentionProblem], timer: Timer) -> AttentionLaunch:
        """Return the launch with the least geometric mean of times over the steps.

        Launches that exceed the device's limits are skipped. Raises ValueError if no launch works.
        """
        problems = [new_problem(step) for step in self.steps]
        costs = {}
        for launch in self.launches:
            config.use({self.kernel: launch})
            try:
                costs[launch] = sum(math.log(max(self._ms(problem, timer), 1e-9)) for problem in problems)
            # Triton has separate errors for too much shared memory, too many registers and failed compilation.
            except Exception:
                continue
            finally:
                config.remove_override(self.kernel)
        if not costs:
            raise ValueError(f"no launch of Triton's {self.kernel.name} kernel works on this device")
        return min(costs, key=lambda launch: costs[launch])

    def _ms(self, problem: AttentionProblem, timer: Timer) -> float:
        kernel: PhaseKernel = triton_prefill_kernel if problem.step.phase == "prefill" else triton_decode_kernel

        def run() -> None:
            kernel(problem.q, problem.cache, problem.batch, problem.scale, problem.out)

        return timer(TimedWork(f"launch of {self.kernel.name}, {problem.step.name}", run, run)).device_ms


def searches(shape: AttentionShape, device: torch.device) -> list[Search]:
    """Return the searches for this shape's kernels; none without CUDA, or if launches were measured on this card."""
    if device.type != "cuda" or config.launches_of(torch.cuda.get_device_name(device)) is not None:
        return []
    padded, size = max(16, config.power_of_two(shape.head_dim)), shape.dtype.itemsize
    steps: tuple[tuple[KernelName, Sequence[AttentionStep]], ...]
    steps = (("decode", _ROWS), ("split", _FEW_ROWS), ("tile", _TILES))
    kernels = [(Kernel(name, padded, size), sample) for name, sample in steps]
    return [Search(kernel, config.alternatives(kernel), sample) for kernel, sample in kernels]

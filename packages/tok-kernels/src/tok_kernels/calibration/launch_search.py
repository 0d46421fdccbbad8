"""Search a few launch configurations of a Triton kernel for the fastest on this device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tok_kernels import launch_config as config
from tok_kernels.attention.interface import AttentionShape, PhaseKernel
from tok_kernels.attention.triton.attention import triton_decode_kernel, triton_prefill_kernel
from tok_kernels.launch_config import AttentionLaunch, KernelName, LaunchKey
from tok_kernels.measure.steps import AttentionProblem, AttentionStep
from tok_kernels.measure.timing import TimedWork, Timer

# Steps on which launches are measured, for the kernels "decode", "split" (few rows, split-KV) and "tile" (prefill).
_DECODE_STEPS = (AttentionStep(rows=1024, own=640), AttentionStep(rows=64, own=2048))
_SPLIT_STEPS = (AttentionStep(rows=32, own=640), AttentionStep(rows=4, own=2048))
_TILE_STEPS = (AttentionStep(chunks=((512, 0),) * 16), AttentionStep(rows=2048, own=16, groups=16, prefix=704))


@dataclass(frozen=True, slots=True)
class LaunchSearch:
    """Launch configurations of a kernel to measure, and the steps to measure them on."""

    kernel: LaunchKey
    launches: Sequence[AttentionLaunch]
    steps: Sequence[AttentionStep]

    def fastest(self, new_problem: Callable[[AttentionStep], AttentionProblem], timer: Timer) -> AttentionLaunch:
        """Return the launch with the least geometric mean of device times over the steps.

        Launches that fail are skipped. Raises ValueError if all fail.
        """
        problems = [new_problem(step) for step in self.steps]
        costs = {}
        for launch in self.launches:
            config.override_launches({self.kernel: launch})
            try:
                costs[launch] = sum(math.log(max(self._ms(problem, timer), 1e-9)) for problem in problems)
            # Triton raises various errors, for example for too much shared memory or a failed compilation.
            except Exception:
                continue
            finally:
                config.remove_override(self.kernel)
        if not costs:
            raise ValueError(f"no launch configuration of Triton's {self.kernel.name} kernel works on this device")
        return min(costs, key=lambda launch: costs[launch])

    def _ms(self, problem: AttentionProblem, timer: Timer) -> float:
        kernel: PhaseKernel = triton_prefill_kernel if problem.step.phase == "prefill" else triton_decode_kernel

        def run() -> None:
            kernel(problem.q, problem.cache, problem.batch, problem.scale, problem.out)

        return timer(TimedWork(f"launch of {self.kernel.name}, {problem.step.name}", run, run)).device_ms


def launch_searches(shape: AttentionShape, device: torch.device) -> list[LaunchSearch]:
    """Return the searches for a shape's kernels; none on the CPU, or if the GPU's launches are built in."""
    if device.type != "cuda" or config.card_launches(torch.cuda.get_device_name(device)) is not None:
        return []
    padded_head, itemsize = max(16, config.power_of_two(shape.head_dim)), shape.dtype.itemsize
    steps: tuple[tuple[KernelName, Sequence[AttentionStep]], ...]
    steps = (("decode", _DECODE_STEPS), ("split", _SPLIT_STEPS), ("tile", _TILE_STEPS))
    kernels = [(LaunchKey(name, padded_head, itemsize), measured) for name, measured in steps]
    return [LaunchSearch(kernel, config.alternatives(kernel), measured) for kernel, measured in kernels]

"""Matmuls give the same bits in every launch while processes share the GPU, which may pause a kernel at any point.

As a script, this file launches the matmuls for some seconds, and prints those of which launches differ.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from support.interpreted import INTERPRETING
from support.matmul_weights import dense_experts, packed_weight, routing_of, scaled_weight
from support.noise import noise
from tok_kernels import ExpertWeights
from tok_kernels.backends.triton import TritonBackend

PROCESSES, SECONDS, LAUNCHES = 8, 20, 100
BF16, BACKEND = torch.bfloat16, TritonBackend()


def matmuls(device: torch.device) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield a name and a launch of each matmul whose operands registers or shared memory hold while others are read."""
    rows, columns = 4096, 14336
    for tokens in (16, 64):
        x = noise(tokens, columns, dtype=BF16, device=device)
        for bits, group in ((4, None), (4, 128), (8, None)):
            packed = packed_weight(rows, columns, device, bits, group, True, BF16)
            yield f"{bits} bits, groups of {group}, {tokens}", partial(BACKEND.packed_gated_linear, x, packed)
        dense = noise(rows, columns, dtype=BF16, device=device) / columns**0.5
        yield f"dense, {tokens}", partial(BACKEND.gated_linear, x, dense)
        scaled = scaled_weight(rows, columns, torch.float8_e4m3fn, None, device)
        yield f"float8, {tokens}", partial(BACKEND.scaled_gated_linear, x, scaled)
        experts, size, inner = 8, 2048, 768
        routing, x = routing_of(tokens, experts, 2, device), x[:, :size].contiguous()
        weights = dense_experts(experts, size, inner, BF16, device)
        yield f"experts, {tokens}", partial(BACKEND.fused_experts, x, routing, weights)
        scaled_experts = ExpertWeights(
            scaled_weight(experts * 2 * inner, size, torch.float8_e4m3fn, None, device),
            scaled_weight(experts * size, inner, torch.float8_e4m3fn, None, device),
        )
        yield f"experts of float8, {tokens}", partial(BACKEND.fused_experts, x, routing, scaled_experts)


def differing_launches(device: torch.device, seconds: float) -> dict[str, int]:
    """Return how many launches of each matmul differ from its first one; only those of which any does."""
    launches = [(name, launch, launch()) for name, launch in matmuls(device)]
    torch.cuda.synchronize()
    found, end = Counter[str](), time.monotonic() + seconds
    while time.monotonic() < end:
        for name, launch, first in launches:
            differ = torch.zeros((), dtype=torch.int64, device=device)
            for _ in range(LAUNCHES):
                differ += (launch() != first).any()
            found[name] += int(differ)
    return dict(+found)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETING or not torch.cuda.is_available(), reason="needs a CUDA device")
def test_matmuls_give_the_same_bits_while_processes_share_the_gpu() -> None:
    command = [sys.executable, __file__, str(SECONDS)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) for _ in range(PROCESSES)]
    found = [process.communicate()[0] for process in processes]
    assert [json.loads(one) for one in found] == [{}] * PROCESSES


if __name__ == "__main__":
    print(json.dumps(differing_launches(torch.device("cuda"), float(sys.argv[1]))))

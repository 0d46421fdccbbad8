"""Random weights of linear layers and of experts, and routings, which depend on their sizes only."""

from __future__ import annotations

import torch

from support.noise import noise
from tok_kernels import MAX_TILES, ExpertWeights, PackedWeight, Routing, ScaledWeight, pack_columns
from tok_kernels.backends.reference import ReferenceBackend


def packed_weight(
    rows: int,
    columns: int,
    device: torch.device,
    bits: int = 4,
    group: int | None = 128,
    zeros: bool = True,
    dtype: torch.dtype = torch.float16,
) -> PackedWeight:
    source = torch.Generator().manual_seed(rows + columns + bits)
    groups = 1 if group is None else -(-columns // group)
    q = torch.randint(0, 1 << bits, (rows, columns), generator=source, dtype=torch.int32)
    zero = torch.randint(0, 1 << bits, (groups, rows), generator=source, dtype=torch.uint8)
    made = PackedWeight(
        words=pack_columns(q.to(device), bits),
        scale_GF=(torch.rand((groups, rows), generator=source) + 0.5).to(device) / columns**0.5 / (1 << bits),
        zero_GF=zero.to(device) if zeros else None,
        bits=bits,
        columns=columns,
        group=group,
        dtype=dtype,
        split_k_counters=torch.zeros(MAX_TILES, dtype=torch.int32, device=device),
    )
    if device.type == "cuda":
        torch.cuda.synchronize()  # with PDL a GEMM may read its weights before earlier kernels have ended
    return made


def scaled_weight(rows: int, width: int, values: torch.dtype, group: int | None, device: torch.device) -> ScaledWeight:
    numbers = (noise(rows, width, device=device) * 20).clamp(-127, 127).to(values)
    scale = 0.01 * (1 + noise(rows, -(-width // (group or width)), device=device).abs())
    return ScaledWeight(numbers, scale / width**0.5 * 5, group)


def dense_experts(experts: int, size: int, columns: int, dtype: torch.dtype, device: torch.device) -> ExpertWeights:
    gate_up = noise(experts * 2 * columns, size, dtype=dtype, device=device) / size**0.5
    return ExpertWeights(gate_up, noise(experts * size, columns, dtype=dtype, device=device) / columns**0.5)


def routing_of(tokens: int, experts: int, chosen: int, device: torch.device, skew: float = 0.0) -> Routing:
    logits_TE = noise(tokens, experts, device=device) - skew * torch.arange(experts, device=device)
    return ReferenceBackend().select_experts(logits_TE, chosen, normalize=True)

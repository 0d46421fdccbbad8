"""Build the cases of mixtures of experts: the router's choice, the experts, and a forward pass with them.

Tokens choose experts evenly, or by a Zipf law: the expert of rank r with a probability proportional to 1 / r.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Literal

import torch
from torch import Tensor

from tok_kernels.backend import Backend
from tok_kernels.measure.cases import CACHE_BYTES, Case, ExpertShape, ModelShape, layer_gemms
from tok_kernels.moe.interface import ExpertWeights, Routing

Law = Literal["even", "Zipf"]
TOKENS = (1, 16, 256, 8192)


def expert_cases(
    backend: Backend, model: ModelShape, device: torch.device, tokens: tuple[int, ...] = TOKENS
) -> Iterator[Case]:
    """Yield the cases of each number of tokens; none for a model without experts."""
    if model.experts is None:
        return
    for count in tokens:
        yield _router(backend, model, model.experts, device, count)
        for law in ("even", "Zipf"):
            yield _experts(backend, model, model.experts, device, count, law)
    yield _forward(backend, model, model.experts, device, tokens[-1])


def _router(backend: Backend, model: ModelShape, shape: ExpertShape, device: torch.device, tokens: int) -> Case:
    logits = torch.randn((tokens, shape.experts), dtype=model.attention.dtype, device=device)
    size = f"{tokens} × {shape.experts} → {shape.chosen}"
    moved = logits.nbytes + 8 * tokens * shape.chosen
    return Case("select_experts", size, lambda: backend.select_experts(logits, shape.chosen, normalize=True), moved)


def _experts(
    backend: Backend, model: ModelShape, shape: ExpertShape, device: torch.device, tokens: int, law: Law
) -> Case:
    """Return a case whose floor counts the matrices of the experts that have tokens, inputs and outputs."""
    x, residual = torch.randn((2, tokens, model.hidden_size), dtype=model.attention.dtype, device=device)
    routing = _routing(shape, device, tokens, law)
    matrices = 3 * model.hidden_size * shape.columns * x.itemsize  # bytes of an expert
    copies = cycle([_weights(model, shape, device) for _ in range(max(1, CACHE_BYTES // (shape.experts * matrices)))])
    moved = len(set(routing.expert_TC.flatten().tolist())) * matrices + 3 * x.nbytes
    return Case(
        f"fused_experts, {law}",
        f"{tokens} × {model.hidden_size}, {shape.chosen} of {shape.experts} × {shape.columns}",
        lambda: backend.fused_experts(x, routing, next(copies), residual_TN=residual),
        moved,
        2 * tokens * shape.chosen * matrices // x.itemsize,
    )


def _forward(backend: Backend, model: ModelShape, shape: ExpertShape, device: torch.device, rows: int) -> Case:
    """Return the GEMMs of every layer, and of the LM head for every row; one layer's weights stand for all.

    The floor counts all weights once, as `forward_gemms` does.
    """
    dtype, layers, hidden = model.attention.dtype, model.attention.layers, model.hidden_size
    sizes = (*layer_gemms(model)[:2], (hidden, model.vocab_size))
    *attention, head = (torch.randn(outputs, inputs, dtype=dtype, device=device).t() for inputs, outputs in sizes)
    x = {width: torch.randn((rows, width), dtype=dtype, device=device) for width, _ in sizes}
    routing, weights = _routing(shape, device, rows, "even"), _weights(model, shape, device)

    def run() -> None:
        for _ in range(layers):
            for weight in attention:
                torch.mm(x[weight.shape[0]], weight)
            backend.fused_experts(x[hidden], routing, weights)
        torch.mm(x[hidden], head)

    of_expert = 3 * hidden * shape.columns
    of_layer = sum(weight.numel() for weight in attention)
    hit = len(set(routing.expert_TC.flatten().tolist()))
    moved = (layers * (of_layer + hit * of_expert) + head.numel()) * dtype.itemsize
    operations = 2 * rows * (layers * (of_layer + shape.chosen * of_expert) + head.numel())
    return Case("GEMMs of a forward pass", f"{rows} rows", run, moved, operations, tokens=rows)


def _weights(model: ModelShape, shape: ExpertShape, device: torch.device) -> ExpertWeights:
    sizes = (2 * shape.experts * shape.columns, model.hidden_size), (shape.experts * model.hidden_size, shape.columns)
    gate_up, down = (torch.randn(size, dtype=model.attention.dtype, device=device) for size in sizes)
    return ExpertWeights(gate_up, down)


def _routing(shape: ExpertShape, device: torch.device, tokens: int, law: Law) -> Routing:
    rank = torch.arange(1, shape.experts + 1)
    popularity: Tensor = torch.ones(shape.experts) if law == "even" else 1.0 / rank
    source = torch.Generator().manual_seed(0)
    expert_TC = torch.multinomial(popularity.expand(tokens, -1), shape.chosen, generator=source)
    weight = torch.full((tokens, shape.chosen), 1 / shape.chosen, device=device)
    return Routing(expert_TC.int().to(device), weight, shape.experts)

"""Build the cases of mixtures of experts: the router's choice, the experts, and a forward pass with them.

Tokens choose experts evenly, or by a Zipf law: the expert of rank r with a probability proportional to 1 / r.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Literal, get_args

import torch
from torch import Tensor

from tok_kernels.backend import Backend
from tok_kernels.measure.cases import CACHE_BYTES, Case, ExpertShape, ModelShape, layer_gemms
from tok_kernels.moe.interface import ExpertWeights, Routing

Law = Literal["even", "Zipf"]
LAWS: tuple[Law, ...] = get_args(Law)
TOKENS = (1, 16, 256, 8192)


def expert_cases(
    backend: Backend, model: ModelShape, device: torch.device, tokens: tuple[int, ...] = TOKENS
) -> Iterator[Case]:
    """Yield the cases of each number of tokens; none for a model without experts."""
    if model.experts is None:
        return
    for count in tokens:
        yield from _router(backend, model, model.experts, device, count)
        for law in LAWS:
            step = _ExpertStep.of(model, model.experts, device, count, law)
            yield step.fused(backend)
            if not backend.name.startswith("reference"):
                yield from step.kernels()
    yield _forward(backend, model, model.experts, device, tokens[-1])


def _router(
    backend: Backend, model: ModelShape, shape: ExpertShape, device: torch.device, tokens: int
) -> Iterator[Case]:
    x = torch.randn((tokens, model.hidden_size), dtype=model.attention.dtype, device=device)
    gate = torch.randn((shape.experts, model.hidden_size), dtype=x.dtype, device=device)
    logits = torch.randn((tokens, shape.experts), dtype=x.dtype, device=device)
    yield Case(
        "linear, router",
        f"{tokens} × {model.hidden_size} → {shape.experts}",
        lambda: backend.linear(x, gate),
        x.nbytes + gate.nbytes + logits.nbytes,
        2 * tokens * gate.numel(),
    )
    size = f"{tokens} × {shape.experts} → {shape.chosen}"
    moved = logits.nbytes + 8 * tokens * shape.chosen
    yield Case("select_experts", size, lambda: backend.select_experts(logits, shape.chosen, normalize=True), moved)


@dataclass(frozen=True, slots=True)
class _ExpertStep:
    """Tokens of a step, the experts that they choose, and copies of the weights to read in turn.

    hit    held experts that have tokens
    pairs  pairs of a token and one of its experts that is held
    """

    shape: ExpertShape
    law: Law
    x_TN: Tensor
    routing: Routing
    copies: Iterator[ExpertWeights]
    hit: int
    pairs: int

    @classmethod
    def of(cls, model: ModelShape, shape: ExpertShape, device: torch.device, tokens: int, law: Law) -> _ExpertStep:
        """Return a step of random tokens and weights."""
        x_TN = torch.randn((tokens, model.hidden_size), dtype=model.attention.dtype, device=device)
        routing = _routing(shape, device, tokens, law)
        held = [expert for expert in routing.expert_TC.flatten().tolist() if expert < shape.held]
        size = 3 * shape.held * model.hidden_size * shape.columns * x_TN.itemsize
        weights = [_weights(model, shape, device) for _ in range(max(1, CACHE_BYTES // size))]
        return cls(shape, law, x_TN, routing, cycle(weights), len(set(held)), len(held))

    def fused(self, backend: Backend) -> Case:
        """Return the case of all experts; the floor counts the matrices of experts hit, inputs and outputs."""
        x_TN, residual_TN = self.x_TN, torch.zeros_like(self.x_TN)
        return self._case(
            "fused_experts",
            lambda: backend.fused_experts(x_TN, self.routing, next(self.copies), residual_TN=residual_TN),
            3 * x_TN.nbytes,
            matrices=3,
        )

    def kernels(self) -> Iterator[Case]:
        """Yield the cases of Triton's kernels one by one. Importing them loads Triton."""
        from tok_kernels.moe.triton import combine, grouped_gemm, grouped_launch
        from tok_kernels.moe.triton_route import sort_pairs

        x_TN, routing, held = self.x_TN, self.routing, range(self.shape.held)
        (tokens, size), chosen = x_TN.shape, self.shape.chosen
        gate_up, down = (grouped_launch(tokens, routing, x_TN.dtype, gated=gated) for gated in (True, False))
        order = sort_pairs(routing, gate_up.rows, held)
        out_TN = torch.empty_like(x_TN)
        h_RF, y_PN = (x_TN.new_zeros((tokens * chosen, width)) for width in (self.shape.columns, size))
        rows = self.pairs * self.shape.columns * x_TN.itemsize  # bytes of the rows between both GEMMs
        yield self._case(
            "sort_pairs",
            lambda: sort_pairs(routing, gate_up.rows, held),
            routing.expert_TC.nbytes + 4 * self.pairs + order.tile_3S.nbytes,
        )
        yield self._case(
            "grouped GEMM, gate and up",
            lambda: grouped_gemm(gate_up, x_TN, next(self.copies).gate_up, h_RF, order, chosen, gated=True),
            min(tokens, self.pairs) * size * x_TN.itemsize + rows,
            matrices=2,
        )
        yield self._case(
            "grouped GEMM, down",
            lambda: grouped_gemm(down, h_RF, next(self.copies).down, y_PN, order, chosen, gated=False),
            rows + self.pairs * size * x_TN.itemsize,
            matrices=1,
        )
        yield self._case(
            "combine",
            lambda: combine(y_PN, routing, held, out_TN, add=False),
            self.pairs * size * x_TN.itemsize + routing.weight_TC.nbytes + x_TN.nbytes,
        )

    def _case(self, kernel: str, run: Callable[[], object], moved: int, matrices: int = 0) -> Case:
        """Return a case that moves `moved` bytes, and `matrices` matrices of each expert hit."""
        (tokens, size), shape = self.x_TN.shape, self.shape
        matrix = matrices * size * shape.columns  # elements
        held = f", {shape.held} held" if shape.held < shape.experts else ""
        return Case(
            f"{kernel}, {self.law}",
            f"{tokens} × {size}, {shape.chosen} of {shape.experts} × {shape.columns}{held}",
            run,
            moved + self.hit * matrix * self.x_TN.itemsize,
            2 * self.pairs * matrix,
        )


def _forward(backend: Backend, model: ModelShape, shape: ExpertShape, device: torch.device, rows: int) -> Case:
    """Return the GEMMs of every layer, and of the LM head for every row; all layers use one layer's weights.

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
    held = [expert for expert in routing.expert_TC.flatten().tolist() if expert < shape.held]
    moved = (layers * (of_layer + len(set(held)) * of_expert) + head.numel()) * dtype.itemsize
    operations = 2 * (layers * (rows * of_layer + len(held) * of_expert) + rows * head.numel())
    return Case("GEMMs of a forward pass", f"{rows} rows", run, moved, operations, tokens=rows)


def _weights(model: ModelShape, shape: ExpertShape, device: torch.device) -> ExpertWeights:
    sizes = (2 * shape.held * shape.columns, model.hidden_size), (shape.held * model.hidden_size, shape.columns)
    gate_up, down = (torch.randn(size, dtype=model.attention.dtype, device=device) for size in sizes)
    return ExpertWeights(gate_up, down, range(shape.held))


def _routing(shape: ExpertShape, device: torch.device, tokens: int, law: Law) -> Routing:
    rank = torch.arange(1, shape.experts + 1)
    popularity: Tensor = torch.ones(shape.experts) if law == "even" else 1.0 / rank
    source = torch.Generator().manual_seed(0)
    expert_TC = torch.multinomial(popularity.expand(tokens, -1), shape.chosen, generator=source)
    weight = torch.full((tokens, shape.chosen), 1 / shape.chosen, device=device)
    return Routing(expert_TC.int().to(device), weight, shape.experts)

"""Build the cases of mixtures of experts: the router, top-k selection, the experts, and a forward pass with them.

Expert loads are balanced ("even"), or follow Zipf's law: the r-th expert has a probability proportional to 1 / r.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Literal, get_args

import torch
from torch import Tensor

from tok_kernels.backend import Backend
from tok_kernels.measure.cases import ROTATED_BYTES, Case, ExpertShape, ModelShape, layer_gemms
from tok_kernels.moe.interface import ExpertWeights, Routing

LoadDistribution = Literal["even", "Zipf"]
LOAD_DISTRIBUTIONS: tuple[LoadDistribution, ...] = get_args(LoadDistribution)
STEP_TOKENS = (1, 16, 256, 8192)


def expert_cases(
    backend: Backend, model: ModelShape, device: torch.device, tokens: tuple[int, ...] = STEP_TOKENS
) -> Iterator[Case]:
    """Yield the cases for each number of tokens; none for a model without experts."""
    if model.experts is None:
        return
    for count in tokens:
        yield from _router_cases(backend, model, model.experts, device, count)
        for load in LOAD_DISTRIBUTIONS:
            step = _ExpertStep.random(model, model.experts, device, count, load)
            yield step.fused_case(backend)
            if not backend.name.startswith("reference"):
                yield from step.kernel_cases()
    yield _forward_case(backend, model, model.experts, device, tokens[-1])


def _router_cases(
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
    size = f"{tokens} × {shape.experts} → {shape.top_k}"
    written = 8 * tokens * shape.top_k  # int32 experts and float32 weights
    yield Case(
        "select_experts",
        size,
        lambda: backend.select_experts(logits, shape.top_k, normalize=True),
        logits.nbytes + written,
    )


@dataclass(frozen=True, slots=True)
class _ExpertStep:
    """Tokens of a step, their routing, and weights that the runs of a case read in turn.

    active  local experts that have tokens
    pairs   pairs of a token and one of its local experts
    """

    shape: ExpertShape
    load: LoadDistribution
    x_TN: Tensor
    routing: Routing
    weights: Iterator[ExpertWeights]
    active: int
    pairs: int

    @classmethod
    def random(
        cls, model: ModelShape, shape: ExpertShape, device: torch.device, tokens: int, load: LoadDistribution
    ) -> _ExpertStep:
        """Return a step of random tokens and weights."""
        x_TN = torch.randn((tokens, model.hidden_size), dtype=model.attention.dtype, device=device)
        routing = _routing(shape, device, tokens, load)
        active, pairs = _local_load(routing, shape)
        weight_bytes = 3 * shape.local_experts * model.hidden_size * shape.intermediate_size * x_TN.itemsize
        weights = [_weights(model, shape, device) for _ in range(max(1, ROTATED_BYTES // weight_bytes))]
        return cls(shape, load, x_TN, routing, cycle(weights), active, pairs)

    def fused_case(self, backend: Backend) -> Case:
        """Return the case of all experts; the floor counts inputs, outputs and the weights of active experts."""
        x_TN, residual_TN = self.x_TN, torch.zeros_like(self.x_TN)
        return self._case(
            "fused_experts",
            lambda: backend.fused_experts(x_TN, self.routing, next(self.weights), residual_TN=residual_TN),
            3 * x_TN.nbytes,
            matrices=3,
        )

    def kernel_cases(self) -> Iterator[Case]:
        """Yield the cases of the Triton kernels of `fused_experts`, one by one."""
        # Imported here, because other backends must not load Triton.
        from tok_kernels.moe.triton import combine, grouped_gemm, grouped_launch, use_expert_gemv
        from tok_kernels.moe.triton_route import sort_pairs

        if use_expert_gemv(self.x_TN, next(self.weights)):
            yield from self._gemv_cases()
            return
        x_TN, routing, local = self.x_TN, self.routing, range(self.shape.local_experts)
        (tokens, size), top_k, inner = x_TN.shape, self.shape.top_k, self.shape.intermediate_size
        gate_up, down = (grouped_launch(tokens, routing, x_TN.dtype, gated=gated) for gated in (True, False))
        order = sort_pairs(routing, gate_up.block_m, local)
        out_TN = torch.empty_like(x_TN)
        h_RF, y_PN = (x_TN.new_zeros((tokens * top_k, width)) for width in (inner, size))
        h_bytes = self.pairs * inner * x_TN.itemsize
        yield self._case(
            "sort_pairs",
            lambda: sort_pairs(routing, gate_up.block_m, local),
            routing.expert_TC.nbytes + 4 * self.pairs + order.tile_3S.nbytes,
        )
        yield self._case(
            "grouped GEMM, gate and up",
            lambda: grouped_gemm(gate_up, x_TN, next(self.weights).gate_up, h_RF, order, top_k, gated=True),
            min(tokens, self.pairs) * size * x_TN.itemsize + h_bytes,
            matrices=2,
        )
        yield self._case(
            "grouped GEMM, down",
            lambda: grouped_gemm(down, h_RF, next(self.weights).down, y_PN, order, top_k, gated=False),
            h_bytes + self.pairs * size * x_TN.itemsize,
            matrices=1,
        )
        yield self._case(
            "combine",
            lambda: combine(y_PN, routing, local, out_TN, add=False),
            self.pairs * size * x_TN.itemsize + routing.weight_TC.nbytes + x_TN.nbytes,
        )

    def _gemv_cases(self) -> Iterator[Case]:
        """Yield the cases of the kernels that compute the experts of a few tokens."""
        from tok_kernels.moe.triton_gemv import combining_expert_gemv, expert_gemv_launch, gated_expert_gemv

        x_TN, routing, local = self.x_TN, self.routing, range(self.shape.local_experts)
        (tokens, size), top_k, inner = x_TN.shape, self.shape.top_k, self.shape.intermediate_size
        gate_up, down = (
            expert_gemv_launch(tokens, x_TN.dtype.itemsize, inputs, gated=gated)
            for inputs, gated in ((size, True), (top_k * inner, False))
        )
        out_TN, h_PF = torch.empty_like(x_TN), x_TN.new_zeros((tokens * top_k, inner))
        h_bytes = self.pairs * inner * x_TN.itemsize

        def project_up() -> None:
            weight = next(self.weights).gate_up
            assert isinstance(weight, Tensor)
            gated_expert_gemv(gate_up, x_TN, routing, weight, local, h_PF)

        def project_down() -> None:
            weight = next(self.weights).down
            assert isinstance(weight, Tensor)
            combining_expert_gemv(down, h_PF, routing, weight, local, out_TN, add=False)

        yield self._case("expert GEMV, gate and up", project_up, x_TN.nbytes + h_bytes, matrices=2)
        moved = h_bytes + routing.weight_TC.nbytes + x_TN.nbytes
        yield self._case("expert GEMV, down and combine", project_down, moved, matrices=1)

    def _case(self, kernel: str, run: Callable[[], object], activation_bytes: int, matrices: int = 0) -> Case:
        """Return a case that moves `activation_bytes`, and `matrices` of the 3 matrices of each active expert."""
        (tokens, size), shape = self.x_TN.shape, self.shape
        parameters = matrices * size * shape.intermediate_size  # of an expert
        local = f", {shape.local_experts} local" if shape.local_experts < shape.experts else ""
        return Case(
            f"{kernel}, {self.load}",
            f"{tokens} × {size}, {shape.top_k} of {shape.experts} × {shape.intermediate_size}{local}",
            run,
            activation_bytes + self.active * parameters * self.x_TN.itemsize,
            2 * self.pairs * parameters,
        )


def _forward_case(backend: Backend, model: ModelShape, shape: ExpertShape, device: torch.device, rows: int) -> Case:
    """Return the GEMMs of all layers, and of the LM head for every row; all layers use one layer's weights.

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

    expert_size = 3 * hidden * shape.intermediate_size  # parameters of an expert
    attention_size = sum(weight.numel() for weight in attention)  # parameters of a layer's attention
    active, pairs = _local_load(routing, shape)
    min_bytes = (layers * (attention_size + active * expert_size) + head.numel()) * dtype.itemsize
    flops = 2 * (layers * (rows * attention_size + pairs * expert_size) + rows * head.numel())
    return Case("GEMMs of a forward pass", f"{rows} rows", run, min_bytes, flops, tokens=rows)


def _local_load(routing: Routing, shape: ExpertShape) -> tuple[int, int]:
    """Return the number of local experts that have tokens, and of pairs of a token and a local expert."""
    local = [expert for expert in routing.expert_TC.flatten().tolist() if expert < shape.local_experts]
    return len(set(local)), len(local)


def _weights(model: ModelShape, shape: ExpertShape, device: torch.device) -> ExpertWeights:
    hidden, inner, experts = model.hidden_size, shape.intermediate_size, shape.local_experts
    sizes = (2 * experts * inner, hidden), (experts * hidden, inner)
    gate_up, down = (torch.randn(size, dtype=model.attention.dtype, device=device) for size in sizes)
    return ExpertWeights(gate_up, down, range(experts))


def _routing(shape: ExpertShape, device: torch.device, tokens: int, load: LoadDistribution) -> Routing:
    rank = torch.arange(1, shape.experts + 1)
    popularity: Tensor = torch.ones(shape.experts) if load == "even" else 1.0 / rank
    source = torch.Generator().manual_seed(0)
    expert_TC = torch.multinomial(popularity.expand(tokens, -1), shape.top_k, generator=source)
    weight = torch.full((tokens, shape.top_k), 1 / shape.top_k, device=device)
    return Routing(expert_TC.int().to(device), weight, shape.experts)

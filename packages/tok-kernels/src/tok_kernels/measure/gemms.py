"""Time all GEMMs of a forward pass with cuBLAS: the upper bound of decoding speed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice

import torch
from torch import Tensor

from tok_kernels.measure.case import Case
from tok_kernels.measure.model import ModelShape

DISTINCT_BYTES = 1 << 30
"""Bytes of distinct layer weights, if the model has as many: far more than a device's cache keeps until they are
reread."""


def layer_gemms(model: ModelShape) -> tuple[tuple[int, int], ...]:
    """Return (inputs, outputs) of a layer's GEMMs: QKV projection, output projection, gate and up, down."""
    shape, hidden, inner = model.attention, model.hidden_size, model.intermediate_size
    queries = shape.heads * shape.head_dim
    return (
        (hidden, queries + 2 * shape.kv_heads * shape.head_dim),
        (queries, hidden),
        (hidden, 2 * inner),
        (inner, hidden),
    )


def forward_gemms(model: ModelShape, device: torch.device, rows: int) -> Case:
    """Return the GEMMs of every layer, and of the LM head for every row, each with random inputs.

    A few layers' weights are used in turn for all layers. The floor counts all weights once and no activations, which
    may stay in the device's cache between GEMMs.
    """
    sizes, dtype = layer_gemms(model), model.attention.dtype
    layer_bytes = sum(inputs * outputs for inputs, outputs in sizes) * dtype.itemsize
    layers = model.attention.layers
    made = min(layers, -(-DISTINCT_BYTES // layer_bytes))
    x = {width: torch.randn((rows, width), dtype=dtype, device=device) for width, _ in sizes}
    weights = [[_weight(*size, dtype, device) for size in sizes] for _ in range(made)]
    head = _weight(model.hidden_size, model.vocab_size, dtype, device)

    def forward() -> Iterator[Tensor]:
        for layer in islice(cycle(weights), layers):
            yield from layer
        yield head

    def run() -> None:
        for weight in forward():
            torch.mm(x[weight.shape[0]], weight)

    parameters = layers * layer_bytes // dtype.itemsize + head.numel()
    moved = parameters * dtype.itemsize
    return Case("products of a forward", f"{rows} rows", run, moved, 2 * rows * parameters, tokens=rows)


def _weight(inputs: int, outputs: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a weight `[inputs, outputs]`, transposed in memory as in a checkpoint."""
    return torch.randn((outputs, inputs), dtype=dtype, device=device).t()

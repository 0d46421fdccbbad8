"""Load the GEMM kernels of a pipeline for each number of rows before the first request.

cuBLAS chooses a kernel by the number of rows: by about how many tiles they make, and by whether it is a multiple of
eight. A kernel is loaded when it is first used, and loading waits until the device is idle. In a pipeline, transfers
on the device wait for other stages, so that it is not idle before those have sent their results. Stages would then
compute one after the other, and lose about a second for each new kernel.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch

from tok_core.models import CausalLM, DecoderLayer, Linear
from tok_core.parallel import choose_layout
from tok_core.quantization import LinearMethod

EACH = 1024  # rows; every number up to this is warmed up
LAYER, HEAD = 16, 64  # above EACH, multiples of these, for layers and for the LM head, which has few kernels
ODD = 64  # above EACH, also one odd number in each so many


@torch.inference_mode()
def warm_up_gemms(model: CausalLM, most_tokens: int, most_rows: int) -> None:
    """Run the GEMMs of a stage's layers for steps of up to `most_tokens`, and logits of up to `most_rows` rows.

    All workers of a replica call this at the same point. Does nothing without pipeline parallelism.
    """
    if model.shard_plan.coordinates.stages == 1:
        return
    layers = cast("Iterable[DecoderLayer]", model.model.layers.values())
    different = {_formats(layer): layer for layer in layers}
    device, size = model.cos_sin_LD.device, model.config.hidden_size
    for tokens in row_counts(most_tokens, LAYER):
        layout = None if model.tensor is None else choose_layout(model.tensor, tokens)
        for layer in different.values():
            layer.run_gemms(torch.zeros((model.stream_rows(tokens), size), dtype=model.dtype, device=device), layout)
    for rows in row_counts(most_rows, HEAD) if model.shard_plan.coordinates.last else ():
        model.logits(torch.zeros((rows, size), dtype=model.dtype, device=device))


def _formats(layer: DecoderLayer) -> tuple[tuple[LinearMethod, torch.dtype], ...]:
    """Return methods and dtypes of the layer's linear layers, which are all that GEMMs of layers differ in."""
    return tuple((module.method, module.dtype) for module in layer.modules() if isinstance(module, Linear))


def row_counts(max_rows: int, step: int) -> list[int]:
    """Return row counts: all up to EACH, then multiples of `step` and one odd number in each ODD, and `max_rows`.

    >>> row_counts(1200, 64)[1022:]
    [1023, 1024, 1057, 1088, 1121, 1152, 1185, 1200]
    """
    further = {*range(EACH + step, max_rows, step), *range(EACH + ODD // 2 + 1, max_rows, ODD)}
    return [*range(1, min(max_rows, EACH + 1)), *sorted(further), max_rows]

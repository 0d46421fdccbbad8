"""Load the GEMM kernels of a pipeline for each number of rows before the first request.

cuBLAS chooses a kernel by the number of rows: by their number of tiles, and by whether it is a multiple of eight. A
kernel is loaded when it is first used, and loading waits until the device is idle. In a pipeline, transfers on the
device wait for other stages, so that the device is idle only once those have sent their results. Stages would then
compute one after the other, and lose about a second for each new kernel.
"""

from __future__ import annotations

from typing import cast

import torch

from tok_core.models import CausalLM, DecoderLayer
from tok_core.parallel import choose_layout
from tok_core.worker.layer_kinds import different_layers

MAX_CONSECUTIVE_ROWS = 1024  # every number of rows up to this is warmed up
LAYER_ROW_STEP = 16  # above it, multiples of this for layers,
HEAD_ROW_STEP = 64  # multiples of this for the LM head, which has few kernels,
ODD_ROW_STEP = 64  # and one odd number in each range of this length


@torch.inference_mode()
def warm_up_gemms(model: CausalLM, max_tokens: int, max_rows: int) -> None:
    """Run the GEMMs of a stage's layers for steps of up to `max_tokens`, and logits of up to `max_rows` rows.

    All workers of a replica call this at the same point. Does nothing without pipeline parallelism.
    """
    if model.shard_plan.coordinates.stages == 1:
        return
    layers = [cast("DecoderLayer", model.model.layers[str(number)]) for number in different_layers(model)]
    device, size = model.cos_sin_LD.device, model.config.hidden_size
    for tokens in row_counts(max_tokens, LAYER_ROW_STEP):
        layout = None if model.tensor is None else choose_layout(model.tensor, tokens)
        for layer in layers:
            layer.run_gemms(torch.zeros((model.stream_rows(tokens), size), dtype=model.dtype, device=device), layout)
    for rows in row_counts(max_rows, HEAD_ROW_STEP) if model.shard_plan.coordinates.last else ():
        model.logits(torch.zeros((rows, size), dtype=model.dtype, device=device))


def row_counts(max_rows: int, step: int) -> list[int]:
    """Return numbers of rows: consecutive ones, then multiples of `step` and some odd ones, and `max_rows`.

    >>> row_counts(1200, 64)[1022:]
    [1023, 1024, 1057, 1088, 1121, 1152, 1185, 1200]
    """
    start = MAX_CONSECUTIVE_ROWS
    further = {*range(start + step, max_rows, step), *range(start + ODD_ROW_STEP // 2 + 1, max_rows, ODD_ROW_STEP)}
    return [*range(1, min(max_rows, start + 1)), *sorted(further), max_rows]

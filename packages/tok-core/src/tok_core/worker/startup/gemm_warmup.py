"""Load the GEMM kernels of a pipeline for each number of rows before the first request.

Which of cuBLAS's kernels that is depends on the number of rows: on about how many tiles they make, and on whether it is
a multiple of eight. Each is loaded when it is used for the first time, and loading waits until the device has nothing
to do. Alone that is soon; in a pipeline not before other stages have sent what transfers wait for on the device, so
that stages would compute one after the other, a second for each such kernel.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch

from tok_core.models import CausalLM, DecoderLayer
from tok_core.parallel import choose_layout

EACH = 1024  # rows up to which each number is used for itself
LAYER, HEAD = 16, 64  # of further numbers, multiples of these: an LM head's kernels are few
ODD = 64  # and of so many, one that is no multiple of eight


@torch.inference_mode()
def warm_up_gemms(model: CausalLM, most_tokens: int, most_rows: int) -> None:
    """Computes those of a stage's layers for up to `most_tokens` of a step, and logits of up to `most_rows` rows.

    To be called by all workers of a replica at the same point. Does nothing where there is one stage.
    """
    if model.share.place.stages == 1:
        return
    layers = cast("Iterable[DecoderLayer]", model.model.layers.values())
    unlike = {layer.self_attn.qkv_proj.weight.dtype: layer for layer in layers}  # they may differ in nothing else
    device, size = model.cos_sin_LD.device, model.config.hidden_size
    for tokens in numbers(most_tokens, LAYER):
        shared = None if model.tensor is None else choose_layout(model.tensor, tokens)
        for layer in unlike.values():
            layer.products(torch.zeros((model.stream_rows(tokens), size), dtype=model.dtype, device=device), shared)
    for rows in numbers(most_rows, HEAD) if model.share.place.last else ():
        model.logits(torch.zeros((rows, size), dtype=model.dtype, device=device))


def numbers(most: int, step: int) -> list[int]:
    """Of rows: each up to EACH; of more, multiples of `step` and odd numbers, an odd one for each ODD; and the most.

    >>> numbers(1200, 64)[1022:]
    [1023, 1024, 1057, 1088, 1121, 1152, 1185, 1200]
    """
    further = {*range(EACH + step, most, step), *range(EACH + ODD // 2 + 1, most, ODD)}
    return [*range(1, min(most, EACH + 1)), *sorted(further), most]

"""Products: what computes them for each number of rows is loaded before the first request.

Which of cuBLAS's kernels that is depends on the number of rows, mostly in steps of about a tile. Each is loaded when it
is used for the first time, and loading may wait until the device has nothing to do: in a pipeline until other stages
have sent what transfers on it wait for, so that stages would compute one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch

from tok_core.model.decoder import CausalLM, DecoderLayer
from tok_core.parallel.tensor_forms import form


@torch.inference_mode()
def load_products(model: CausalLM, most_tokens: int, most_rows: int) -> None:
    """Computes those of a layer for up to `most_tokens` of a step, and logits of up to `most_rows` rows.

    To be called by all workers of a replica at the same point.
    """
    layers = cast("Iterable[DecoderLayer]", model.model.layers.values())
    unlike = {layer.self_attn.qkv_proj.weight.dtype: layer for layer in layers}  # they may differ in nothing else
    device, size = model.cos_sin_LD.device, model.config.hidden_size
    for tokens in numbers(most_tokens):
        shared = None if model.tensor is None else form(model.tensor, tokens)
        for layer in unlike.values():
            layer.products(torch.zeros((model.stream_rows(tokens), size), dtype=model.dtype, device=device), shared)
    for rows in numbers(most_rows) if model.share.place.last else ():
        model.logits(torch.zeros((rows, size), dtype=model.dtype, device=device))


def numbers(most: int) -> list[int]:
    """Of rows, each for those since the one before it: multiples of 8, of 64 beyond 1,024, and the most.

    >>> numbers(20)
    [8, 16, 20]
    >>> numbers(1200)[-5:]
    [1016, 1024, 1088, 1152, 1200]
    """
    return [*range(8, min(most, 1025), 8), *range(1088, most, 64), most]

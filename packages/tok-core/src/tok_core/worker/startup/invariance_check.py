"""Check that linear layers and experts are batch-invariant: a row has the same bits among any number of rows.

A start with `batch_invariant` runs this check once the weights are loaded. cuBLAS documents neither the order of its
sums nor its choice of kernels, and both may change with its version.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tok_core.errors import InvalidField
from tok_core.models import CausalLM, DecoderLayer, Linear, MixtureOfExperts, TokenEmbedding
from tok_core.runtime import HEARTBEAT

# Numbers of rows to check. Most are small, since cuBLAS changes its kernel most often among few rows.
ROW_COUNTS = (*range(1, 73), 80, 96, 100, 112, 128, 144, 160, 200, 256, 300, 320, 384, 512, 640, 777, 1000, 1024, 1536)
_MAX_OUTPUT_ELEMENTS = 1 << 27  # of a linear layer; bounds the memory


@torch.inference_mode()
def check_rows(model: CausalLM, max_rows: int) -> None:
    """Raise InvalidField if a linear layer or experts are not batch-invariant, up to `max_rows` rows.

    One linear layer of each shape is checked, and the experts of one layer together.
    """
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, DecoderLayer)]
    layers_with_experts = [(name, layer) for name, layer in layers if isinstance(layer.mlp, MixtureOfExperts)]
    for name, layer in layers_with_experts[:1]:
        max_count = max(1, min(max_rows, 2 * ROW_COUNTS[-1]))
        _require_equal_bits(f"{name}.mlp", experts_function(layer, max_count), max_count)
    expert_matrices = {
        linear for _, layer in layers_with_experts for linear in (layer.mlp.gate_up_proj, layer.mlp.down_proj)
    }
    checked_shapes = set()
    for name, module in model.named_modules():
        if not isinstance(module, Linear | TokenEmbedding) or module in expert_matrices:
            continue
        weight_NK = module.get_parameter("weight")
        gated = isinstance(module, Linear) and module.gated
        if (weight_NK.shape, weight_NK.dtype, gated) in checked_shapes:
            continue
        checked_shapes.add((weight_NK.shape, weight_NK.dtype, gated))
        HEARTBEAT.turned()
        max_count = max(1, min(max_rows, 2 * ROW_COUNTS[-1], _MAX_OUTPUT_ELEMENTS // len(weight_NK)))
        shape = f"{name}, {list(weight_NK.shape)} in {weight_NK.dtype},"
        _require_equal_bits(shape, layer_function(module, weight_NK, max_count), max_count)


def _require_equal_bits(layer: str, compute: Callable[[int], Tensor], max_count: int) -> None:
    """Raise InvalidField if `compute` gives a row other bits among fewer rows than among `max_count`.

    compute  returns the outputs of a layer for the first `rows` rows of a fixed input
    """
    different = differing_row_counts(compute, max_count)
    if different:
        found = f"{layer} gives a row other bits among {different} rows than among {max_count}"
        raise InvalidField("batch_invariant", True, f"false here ({found})")


def experts_function(layer: DecoderLayer, max_rows: int) -> Callable[[int], Tensor]:
    """Return a function that applies the layer's norm and experts to the first rows of a fixed random input."""
    norm = layer.post_attention_layernorm
    generator = torch.Generator(norm.weight.device).manual_seed(0)
    x_TN = torch.randn((max_rows, len(norm.weight)), generator=generator, device=norm.weight.device).to(
        norm.weight.dtype
    )
    return lambda rows: layer.mlp(x_TN[:rows].clone(), norm)


def layer_function(module: Linear | TokenEmbedding, weight_NK: Tensor, max_rows: int) -> Callable[[int], Tensor]:
    """Return a function that applies the layer to the first rows of a fixed random input."""
    generator = torch.Generator(weight_NK.device).manual_seed(0)
    outputs, inputs = weight_NK.shape
    x_TK = torch.randn((max_rows, inputs), generator=generator, device=weight_NK.device).to(weight_NK.dtype)
    if isinstance(module, Linear) and module.gated:
        return lambda rows: module.backend.gated_linear(x_TK[:rows], weight_NK)
    residual_TN = torch.randn((max_rows, outputs), generator=generator, device=weight_NK.device).to(weight_NK.dtype)
    return lambda rows: module.backend.linear(x_TK[:rows], weight_NK, residual_TN=residual_TN[:rows].clone())


def differing_row_counts(compute: Callable[[int], Tensor], max_rows: int) -> list[int]:
    """Return the ROW_COUNTS below `max_rows` whose outputs have other bits than the same rows among `max_rows`."""
    reference, row_counts = compute(max_rows).view(torch.int16), [rows for rows in ROW_COUNTS if rows < max_rows]
    differs_on_device = [(compute(rows).view(torch.int16) != reference[:rows]).any() for rows in row_counts]
    differs: list[bool] = torch.stack(differs_on_device).tolist() if differs_on_device else []
    return [rows for rows, differ in zip(row_counts, differs, strict=True) if differ]

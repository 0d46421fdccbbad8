"""Find the layers of a bfloat16 model whose QKV projection may overflow float16, and keep those in bfloat16.

Axes: N hidden size, F queries, keys and values of a rank, L layers of a stage.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tok_core.quantization import WeightTarget

if TYPE_CHECKING:
    from tok_core.models.decoder import CausalLM, DecoderLayer
    from tok_core.models.layers import Linear

MAX_FLOAT16_RESULT = 60_000.0  # float16 ends at 65 504; rounding errors are far smaller than the difference


def recast_overflowing_qkv(model: CausalLM) -> dict[str, WeightTarget]:
    """Recast QKV projections that may overflow float16 to the model's dtype, and return their weight targets.

    The caller must fill these targets again. All ranks of a stage call this once weights are loaded, and decide alike:
    they gather normed hidden states, which must have one dtype. Projections recast before stay as they are.
    """
    if model.dtype != torch.bfloat16:
        return {}
    layers: dict[str, DecoderLayer] = dict(model.model.layers.items())  # type: ignore[arg-type]
    bound_L = torch.stack([_result_bound(layer.qkv_gain(), layer.self_attn.qkv_proj) for layer in layers.values()])
    if model.tensor is not None:
        bound_L = model.tensor.gather(bound_L).amax(0)
    refill: dict[str, WeightTarget] = {}
    for number, bound in zip(layers, bound_L.tolist(), strict=True):
        linear = layers[number].self_attn.qkv_proj
        if not bound <= MAX_FLOAT16_RESULT and linear.dtype != model.dtype:  # also true for NaN
            linear.recast(model.dtype)
            prefix = f"model.layers.{number}.self_attn"
            refill |= {f"{prefix}.{name}": target for name, target in linear.targets()}
    return refill


def _result_bound(gain_N: Tensor, linear: Linear) -> Tensor:
    """Return a bound, for any x, on the entries of `norm(x)`, of the GEMM's result and of its partial sums.

    `x / rms(x)` has a length of at most √N. By Cauchy–Schwarz a row w of W yields at most `√N · ‖w · gain‖`, plus the
    bias.
    """
    root = math.sqrt(len(gain_N))
    bound_F = torch.linalg.vector_norm(linear.method.dense_weight(linear) * gain_N.float(), dim=1) * root
    if linear.bias is not None:
        bound_F = bound_F + linear.bias.float().abs()
    return torch.maximum(bound_F.max(), gain_N.float().abs().max() * root)

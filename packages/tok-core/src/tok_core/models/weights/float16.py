"""For which layers of a bfloat16 model float16 has the range; queries, keys and values of the others are bfloat16, too.

Axes: N hidden size, F queries, keys and values of a rank, L layers of a stage.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tok_core.models.weights.targets import WeightTarget, targets

if TYPE_CHECKING:
    from tok_core.models.decoder import CausalLM, DecoderLayer
    from tok_core.models.layers import Linear

LIMIT = 60_000.0  # float16 ends at 65 504: what is rounded on the way adds far less than the difference


def keep_coarse(model: CausalLM) -> dict[str, WeightTarget]:
    """Gives layers that may leave float16's range parameters of the model's dtype; where those are to be filled from.

    To be called by all ranks of a stage once weights are loaded: they gather what is normed, in one dtype.
    """
    if model.dtype != torch.bfloat16:
        return {}
    layers: dict[str, DecoderLayer] = dict(model.model.layers.items())  # type: ignore[arg-type]
    most_L = torch.stack([_most(layer.input_layernorm.weight, layer.self_attn.qkv_proj) for layer in layers.values()])
    if model.tensor is not None:
        most_L = model.tensor.gather(most_L).amax(0)
    again: dict[str, WeightTarget] = {}
    for number, most in zip(layers, most_L.tolist(), strict=True):
        if not most <= LIMIT:  # or no number at all
            linear = layers[number].self_attn.qkv_proj
            linear.recast(model.dtype)
            prefix = f"model.layers.{number}.self_attn"
            again |= {f"{prefix}.{name}": target for name, target in targets(linear).items()}
    return again


def _most(gain_N: Tensor, linear: Linear) -> Tensor:
    """What no entry exceeds, be x what it may, of `norm(x)`, of its product, or of a part of that product's sums.

    A normed x is no longer than √N, and a row of W times the gains multiplies it by no more than its own length.
    """
    root = math.sqrt(len(gain_N))
    most_F = torch.linalg.vector_norm(linear.weight * gain_N.float(), dim=1) * root
    if linear.bias is not None:
        most_F += linear.bias.float().abs()
    return torch.maximum(most_F.max(), gain_N.float().abs().max() * root)

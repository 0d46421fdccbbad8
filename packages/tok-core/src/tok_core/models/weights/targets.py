"""Map each tensor of a checkpoint to the parameter view that it fills and to the part of it that is needed."""

from __future__ import annotations

from torch import nn

from tok_core.models.layers import Linear, TokenEmbedding
from tok_core.parallel import Slice
from tok_core.quantization import WeightTarget


def targets(model: nn.Module) -> dict[str, WeightTarget]:
    """Return the target of each tensor name of a checkpoint; together they cover all parameters once."""
    found: dict[str, WeightTarget] = {}
    for path, module in model.named_modules():
        if isinstance(module, Linear):
            parent = path.rpartition(".")[0]
            for name, target in module.targets():
                found[f"{parent}.{name}".removeprefix(".")] = target
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, TokenEmbedding):
                found[f"{path}.{name}"] = WeightTarget(parameter, (module.part, Slice.whole(parameter.shape[1])))
            else:
                found[f"{path}.{name}"] = WeightTarget(parameter, tuple(Slice.whole(size) for size in parameter.shape))
    return found

"""Where each tensor of a checkpoint goes: a view of a parameter, and the part of the tensor that fills it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from tok_core.models.layers import Linear, TokenEmbedding
from tok_core.parallel import Slice


class StoredTensor(Protocol):
    """A tensor of a safetensors file, described but not yet read; indexing reads a part of it."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """`view`, a part of a parameter, is filled by what `parts`, one an axis, cut out of the checkpoint's tensor."""

    view: Tensor
    parts: tuple[Slice, ...]

    @property
    def shape(self) -> list[int]:
        """Of the checkpoint's tensor."""
        return [part.size for part in self.parts]

    @property
    def is_whole(self) -> bool:
        """Whether all of the tensor is here."""
        return all(part.is_whole for part in self.parts)

    def part_of(self, stored: StoredTensor | Tensor) -> Tensor:
        """What of the checkpoint's tensor belongs here."""
        return stored[tuple(slice(part.start, part.stop) for part in self.parts)]

    def fill(self, own: Tensor) -> bool:
        """Takes over the part that belongs here, cast to the parameter's dtype; whether that has the range for it."""
        self.view.copy_(own)
        narrower = torch.finfo(self.view.dtype).max < torch.finfo(own.dtype).max
        return not narrower or bool((torch.isfinite(self.view) | ~torch.isfinite(own).to(self.view.device)).all())


def targets(model: nn.Module) -> dict[str, WeightTarget]:
    """For each tensor name of a checkpoint its place in the model; together they cover all parameters once."""
    found: dict[str, WeightTarget] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, Linear):
                parent = path.rpartition(".")[0]
                views = parameter.split([part.count for part in module.parts.values()])
                for (part, rows), view in zip(module.parts.items(), views, strict=True):
                    cut = (rows, module.inputs)[: parameter.dim()]
                    found[f"{parent}.{part}.{name}".removeprefix(".")] = WeightTarget(view, cut)
            elif isinstance(module, TokenEmbedding):
                found[f"{path}.{name}"] = WeightTarget(parameter, (module.part, Slice.whole(parameter.shape[1])))
            else:
                found[f"{path}.{name}"] = WeightTarget(parameter, tuple(Slice.whole(size) for size in parameter.shape))
    return found

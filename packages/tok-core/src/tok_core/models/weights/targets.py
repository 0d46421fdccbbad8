"""Map each tensor of a checkpoint to the parameter view that it fills and to the part of it that is needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from torch import nn

from tok_core.parallel import Slice
from tok_core.quantization import WeightTarget


@runtime_checkable
class CheckpointModule(Protocol):
    """Module that names its tensors in a checkpoint itself, because they are stacked, sharded or stored differently."""

    def targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Yield each tensor's name, relative to the module's parent, and what it fills; submodules are included."""
        ...


def targets(model: nn.Module) -> dict[str, WeightTarget]:
    """Return the target of each tensor name of a checkpoint; together they cover all parameters once.

    Parameters of modules that do not name their tensors have the names of their modules, and are whole on every rank.
    """
    found: dict[str, WeightTarget] = {}
    _collect(model, "", found)
    return found


def _collect(module: nn.Module, path: str, found: dict[str, WeightTarget]) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        found[f"{path}{name}"] = WeightTarget(parameter, tuple(Slice.whole(size) for size in parameter.shape))
    for name, child in module.named_children():
        if isinstance(child, CheckpointModule):
            found |= {f"{path}{own}": target for own, target in child.targets()}
        else:
            _collect(child, f"{path}{name}.", found)

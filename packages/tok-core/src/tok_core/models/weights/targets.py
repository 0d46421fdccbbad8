"""Map each tensor of a checkpoint to the parameter view that it fills and to the part of it that is needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol, runtime_checkable

from torch import nn

from tok_core.parallel import Slice
from tok_core.quantization import StackedTarget, WeightTarget

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@runtime_checkable
class CheckpointModule(Protocol):
    """Module that names its tensors in a checkpoint itself, because they are stacked, sharded or stored differently."""

    def targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Yield each tensor's name, relative to the module's parent, and what it fills; submodules are included."""
        ...


@runtime_checkable
class StackedModule(Protocol):
    """Module whose matrices a checkpoint may also hold stacked, several in one tensor."""

    def stacked_targets(self) -> Iterator[tuple[str, StackedTarget]]:
        """Yield each stacked tensor's name and its target, whose `pieces` have names relative to the module, too."""
        ...


def targets(model: nn.Module) -> dict[str, WeightTarget]:
    """Return the target of each tensor name of a checkpoint; together they cover all parameters once.

    Parameters of other modules than CheckpointModules have the names of PyTorch, and are whole on every rank.
    """
    return {f"{prefix}{name}": target for prefix, module in modules(model) for name, target in module_targets(module)}


def stacked_targets(model: nn.Module) -> dict[str, StackedTarget]:
    """Return the targets of stacked tensors by name; their `pieces` have the names that `targets` returns."""
    return {
        f"{prefix}{name}": replace(target, pieces={f"{prefix}{end}": piece for end, piece in target.pieces.items()})
        for prefix, module in modules(model)
        if isinstance(module, StackedModule)
        for name, target in module.stacked_targets()
    }


def modules(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield each module that may have tensors in a checkpoint, with their prefix: "model.layers.3.mlp."."""
    yield prefix, model
    for name, child in model.named_children():
        if isinstance(child, CheckpointModule):
            yield prefix, child
        else:
            yield from modules(child, f"{prefix}{name}.")


def module_targets(module: nn.Module) -> Iterator[tuple[str, WeightTarget]]:
    """Yield the names of a module's tensors, without the prefix that `modules` yields, and their targets."""
    if isinstance(module, CheckpointModule):
        yield from module.targets()
    else:
        for name, parameter in module.named_parameters(recurse=False):
            yield name, WeightTarget(parameter, tuple(Slice.whole(size) for size in parameter.shape))

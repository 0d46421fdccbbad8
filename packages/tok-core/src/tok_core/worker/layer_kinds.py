"""Run a model through one layer of each kind, which launches every kernel that its other layers launch, too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import cast

from torch import nn

from tok_core.models import CausalLM, DecoderLayer, Linear
from tok_core.worker.state import WorkerState


def different_layers(model: CausalLM) -> list[int]:
    """Return the numbers of a stage's layers that run different kernels: the first layer of each kind.

    Layers of one kind agree in the methods and dtypes of their linear layers, in MLP or experts, and in their window.
    """
    different: dict[object, int] = {}
    for layer in cast("Iterable[DecoderLayer]", model.model.layers.values()):
        formats = tuple((module.method, module.dtype) for module in layer.modules() if isinstance(module, Linear))
        different.setdefault((formats, type(layer.mlp), layer.self_attn.window), layer.number)
    return list(different.values())


@contextmanager
def different_layers_only(model: CausalLM, state: WorkerState) -> Iterator[None]:
    """Let steps run the `different_layers` alone in this context; what they compute means nothing."""
    layers, caches = model.model.layers, state.caches
    cache_of = dict(zip(layers, caches, strict=True))
    kept = [str(number) for number in different_layers(model)]
    try:
        model.model.layers = nn.ModuleDict({number: layers[number] for number in kept})
        state.caches = [cache_of[number] for number in kept]
        yield
    finally:
        model.model.layers, state.caches = layers, caches

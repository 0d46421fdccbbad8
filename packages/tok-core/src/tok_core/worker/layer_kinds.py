"""Run a model through one layer of each kind, which launches every kernel that its other layers launch, too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

from torch import Tensor, nn

from tok_core.models import CausalLM, DecoderLayer, Linear
from tok_core.worker.state import WorkerState
from tok_kernels import LayerCache

ALIGNMENT = 16  # bytes; Triton compiles another variant for pointers that are no multiple


def different_layers(model: CausalLM, caches: Sequence[LayerCache] | None = None) -> list[int]:
    """Return the numbers of a stage's layers that run different kernels: the first layer of each kind.

    Layers of one kind agree in the methods and dtypes of their linear layers, in MLP or experts, and in their window;
    with `caches`, also in the alignment of their caches.
    """
    layers = list(cast("Iterable[DecoderLayer]", model.model.layers.values()))
    alignments = [()] * len(layers) if caches is None else [_alignment(cache) for cache in caches]
    different: dict[object, int] = {}
    for layer, alignment in zip(layers, alignments, strict=True):
        formats = tuple((module.method, module.dtype) for module in layer.modules() if isinstance(module, Linear))
        different.setdefault((formats, type(layer.mlp), layer.self_attn.window, alignment), layer.number)
    return list(different.values())


def _alignment(cache: LayerCache) -> tuple[bool, ...]:
    """Return which tensors of a cache are aligned.

    They are slices of tensors of all layers: with one key head, the scales of layer 1 begin 8 bytes after those of 0.
    """
    tensors: tuple[Tensor | None, ...] = (
        *(cache.k, cache.v, cache.k_scale, cache.v_scale),
        *(cache.k_token_scale, cache.v_token_scale),
    )
    return tuple(one is None or one.storage_offset() * one.itemsize % ALIGNMENT == 0 for one in tensors)


@contextmanager
def different_layers_only(model: CausalLM, state: WorkerState) -> Iterator[None]:
    """Let steps run the `different_layers` alone in this context; what they compute means nothing."""
    layers, caches = model.model.layers, state.caches
    cache_of = dict(zip(layers, caches, strict=True))
    kept = [str(number) for number in different_layers(model, caches)]
    try:
        model.model.layers = nn.ModuleDict({number: layers[number] for number in kept})
        state.caches = [cache_of[number] for number in kept]
        yield
    finally:
        model.model.layers, state.caches = layers, caches

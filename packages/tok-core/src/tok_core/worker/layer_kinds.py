"""Run a model with one layer of each kind only: its other layers launch the same kernels.

Warm-up steps do so. They take a fraction of the time, and what they compute is discarded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

from torch import Tensor, nn

from tok_core.models import CausalLM, DecoderLayer, Linear
from tok_core.worker.state import WorkerState
from tok_kernels import LayerCache

ALIGNMENT = 16  # bytes; Triton compiles another variant of a kernel for pointers that are no multiple


def different_layers(model: CausalLM, caches: Sequence[LayerCache] | None = None) -> list[int]:
    """Return the numbers of a stage's layers that launch different kernels: the first layer of each kind.

    Layers of one kind have linear layers of the same methods and dtypes, the same kind of feed-forward (MLP or experts)
    and the same attention window. With `caches`, their caches are aligned alike, too.
    """
    layers = list(cast("Iterable[DecoderLayer]", model.model.layers.values()))
    alignments = [()] * len(layers) if caches is None else [_alignment(cache) for cache in caches]
    first_of_kind: dict[object, int] = {}
    for layer, alignment in zip(layers, alignments, strict=True):
        formats = tuple((module.method, module.dtype) for module in layer.modules() if isinstance(module, Linear))
        first_of_kind.setdefault((formats, type(layer.mlp), layer.self_attn.window, alignment), layer.number)
    return list(first_of_kind.values())


def _alignment(cache: LayerCache) -> tuple[bool, ...]:
    """Return which tensors of a layer's cache are aligned.

    The tensors are slices of one tensor of all layers. With one key/value head, for example, the scales of layer 1
    begin 8 bytes after those of layer 0, so that they are not aligned.
    """
    tensors: tuple[Tensor | None, ...] = (
        *(cache.k, cache.v, cache.k_scale, cache.v_scale),
        *(cache.k_token_scale, cache.v_token_scale),
    )
    return tuple(x is None or x.storage_offset() * x.itemsize % ALIGNMENT == 0 for x in tensors)


@contextmanager
def different_layers_only(model: CausalLM, state: WorkerState) -> Iterator[None]:
    """Keep only the `different_layers` of the model in this context, in which steps compute no real tokens."""
    layers, caches = model.model.layers, state.caches
    cache_by_layer = dict(zip(layers, caches, strict=True))
    kept = [str(number) for number in different_layers(model, caches)]
    try:
        model.model.layers = nn.ModuleDict({number: layers[number] for number in kept})
        state.caches = [cache_by_layer[number] for number in kept]
        yield
    finally:
        model.model.layers, state.caches = layers, caches

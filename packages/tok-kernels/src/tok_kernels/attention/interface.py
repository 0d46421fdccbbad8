"""Define the interface of attention kernels: the phases of a step, the signature of a kernel, and the model's shape."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, Protocol

import torch
from torch import Tensor

from tok_kernels.batch import AttentionBatch, LayerCache, kv_position_bytes

Phase = Literal["prefill", "decode", "cascade"]

PHASES: tuple[Phase, ...] = ("prefill", "decode", "cascade")


class PhaseKernel(Protocol):
    """A kernel, or sequence of kernels, that computes one phase of a step.

    prefill  writes the outputs of all sequences after the first `num_decode`
    decode   writes the outputs of the first `num_decode` rows in a step without cascade levels
    cascade  writes the outputs of the first `num_decode` rows in a step with cascade levels

    `out_THD` is contiguous, of q's shape and dtype. Its rows that belong to no sequence stay unchanged.
    """

    def __call__(
        self, q_THD: Tensor, cache: LayerCache, batch: AttentionBatch, scale: float, out_THD: Tensor, /
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes and dtypes of a model's attention; all `layers` share the plan of a step.

    `heads` counts query heads, and `page_size` is in tokens. Raises ValueError for sizes below 1, and if `heads` is no
    multiple of `kv_heads`.
    """

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    layers: int
    dtype: torch.dtype
    cache_dtype: torch.dtype

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "head_dim", "page_size", "layers"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} is {value}; allowed: integers from 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads is {self.heads}; allowed: multiples of kv_heads ({self.kv_heads})")

    @property
    def group(self) -> int:
        """Number of query heads that share a key/value head."""
        return self.heads // self.kv_heads

    @property
    def position_bytes(self) -> int:
        """Bytes of a position's keys and values in the cache of one layer, with the scales of an int8 cache."""
        return kv_position_bytes(self.kv_heads, self.head_dim, self.cache_dtype)

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return float(self.head_dim**-0.5)

    def as_json(self) -> dict[str, int | str]:
        """Return the fields by name, with dtypes as text."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}


def _plain(value: int | torch.dtype) -> int | str:
    return value if isinstance(value, int) else str(value).removeprefix("torch.")

"""AttentionShape: what of a model decides which attention kernel is fastest for it."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """A model's attention as the kernels see it; `layers` share what is planned for a step.

    Raises ValueError for sizes below 1, and for query heads that the key/value heads do not divide.
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
        """Query heads of a key/value head."""
        return self.heads // self.kv_heads

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    def as_json(self) -> dict[str, int | str]:
        """The fields by name, data types as text."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}


def _plain(value: int | torch.dtype) -> int | str:
    return value if isinstance(value, int) else str(value).removeprefix("torch.")

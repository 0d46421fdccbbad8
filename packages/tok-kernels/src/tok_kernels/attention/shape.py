"""Define AttentionShape, the properties of a model that decide which attention kernel is fastest for it."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes and dtypes of a model's attention; all `layers` share what is planned for a step.

    Raises ValueError for sizes below 1, and if `heads` is no multiple of `kv_heads`.
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
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    def as_json(self) -> dict[str, int | str]:
        """Return the fields by name, dtypes as text."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}


def _plain(value: int | torch.dtype) -> int | str:
    return value if isinstance(value, int) else str(value).removeprefix("torch.")

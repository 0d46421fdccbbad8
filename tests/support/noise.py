"""Make random tensors that are the same on every device."""

from __future__ import annotations

import torch
from torch import Tensor


def noise(*size: int, dtype: torch.dtype = torch.float32, device: torch.device) -> Tensor:
    """Return normal numbers that depend only on `size`."""
    source = torch.Generator().manual_seed(sum(size))
    return torch.randn(size, generator=source).to(device=device, dtype=dtype)

"""Random tensors that are the same on every device."""

from __future__ import annotations

import torch
from torch import Tensor


def noise(*size: int, dtype: torch.dtype = torch.float32, device: torch.device) -> Tensor:
    """Normal numbers of a size; always the same for it, whatever the device."""
    source = torch.Generator().manual_seed(sum(size))
    return torch.randn(size, generator=source).to(device=device, dtype=dtype)

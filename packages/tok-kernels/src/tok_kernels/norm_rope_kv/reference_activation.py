"""Compute the gated activation of Llama's feed-forward layer."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def silu_and_mul(gate_up_TF: Tensor) -> Tensor:
    """Return `silu(gate) * up` in float32, `gate` the first and `up` the second half of the last axis (Shazeer 2020).

    `[..., 2F] -> [..., F]`, of the input's dtype.
    """
    gate, up = gate_up_TF.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up.float()).to(gate_up_TF.dtype)

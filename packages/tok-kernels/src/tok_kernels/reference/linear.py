"""Linear layers with the norm before and the activation or residual addition after, one operation at a time."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from tok_kernels.reference.activation import silu_and_mul
from tok_kernels.reference.norm import rms_norm


def linear(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    residual_TN: Tensor | None = None,
    wide: bool = False,
) -> Tensor:
    """See `Backend.linear`."""
    x_TK = x_TK if norm is None else rms_norm(x_TK, *norm, weight_NK.dtype if wide else None)
    if wide:
        if residual_TN is not None:
            raise ValueError("a residual is given; allowed: none where wide")
        return functional.linear(x_TK.float(), weight_NK.float(), None if bias_N is None else bias_N.float())
    if residual_TN is None:
        return functional.linear(x_TK, weight_NK, bias_N)
    if bias_N is not None:
        residual_TN += bias_N
    return residual_TN.addmm_(x_TK, weight_NK.t())


def gated_linear(
    x_TK: Tensor, gate_up_FK: Tensor, bias_F: Tensor | None = None, *, norm: tuple[Tensor, float] | None = None
) -> Tensor:
    """See `Backend.gated_linear`."""
    return silu_and_mul(linear(x_TK, gate_up_FK, bias_F, norm=norm))

"""Compute linear layers in plain torch, with norm, activation and residual addition as separate operations."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tok_kernels.linear.quantized_weights import PackedWeight, QuantizedRows, ScaledWeight
from tok_kernels.norm_rope_kv.reference import rms_norm, silu_and_mul


def linear(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    residual_TN: Tensor | None = None,
) -> Tensor:
    """Compute `Backend.linear`."""
    x_TK = x_TK if norm is None else rms_norm(x_TK, *norm, weight_NK.dtype)
    return matmul(x_TK, weight_NK, bias_N, residual_TN)


def gated_linear(
    x_TK: Tensor, gate_up_FK: Tensor, bias_F: Tensor | None = None, *, norm: tuple[Tensor, float] | None = None
) -> Tensor:
    """Compute `Backend.gated_linear`."""
    return silu_and_mul(linear(x_TK, gate_up_FK, bias_F, norm=norm))


def matmul(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, residual_TN: Tensor | None) -> Tensor:
    """Compute `Backend.linear` without a norm by torch's GEMM (cuBLAS on a GPU)."""
    if residual_TN is not None:
        if bias_N is not None:
            residual_TN += bias_N
        return residual_TN.addmm_(x_TK, weight_NK.t())
    if x_TK.dtype == weight_NK.dtype == torch.float16 and x_TK.device.type == "cpu":
        # CPUs multiply float32 several times as fast as float16.
        out_TN = functional.linear(x_TK.float(), weight_NK.float(), None if bias_N is None else bias_N.float())
        return out_TN.half()
    return functional.linear(x_TK, weight_NK, bias_N)


class ReferenceLinear:
    """Linear layers of a `tok_kernels.Backend` in plain torch: quantised weights are dequantised first.

    Subclasses may replace `linear` and `gated_linear`, which all other methods call.
    """

    linear = staticmethod(linear)
    gated_linear = staticmethod(gated_linear)

    def scaled_linear(
        self,
        x_TK: Tensor | QuantizedRows,
        weight: ScaledWeight,
        bias_N: Tensor | None = None,
        *,
        norm: tuple[Tensor, float] | None = None,
        residual_TN: Tensor | None = None,
    ) -> Tensor:
        """Compute `Backend.scaled_linear` without quantising x."""
        assert isinstance(x_TK, Tensor), "only other backends quantise activations"
        bias_N = None if bias_N is None else bias_N.to(x_TK.dtype)
        return self.linear(x_TK, weight.dense(x_TK.dtype), bias_N, norm=norm, residual_TN=residual_TN)

    def scaled_gated_linear(
        self,
        x_TK: Tensor,
        gate_up: ScaledWeight,
        bias_F: Tensor | None = None,
        *,
        norm: tuple[Tensor, float] | None = None,
        down: ScaledWeight | None = None,
    ) -> Tensor | QuantizedRows:
        """Compute `Backend.scaled_gated_linear` without quantising x or the result."""
        return self.gated_linear(x_TK, gate_up.dense(x_TK.dtype), bias_F, norm=norm)

    def packed_linear(
        self,
        x_TK: Tensor,
        weight: PackedWeight,
        bias_N: Tensor | None = None,
        *,
        norm: tuple[Tensor, float] | None = None,
        residual_TN: Tensor | None = None,
    ) -> Tensor:
        """Compute `Backend.packed_linear`."""
        return self.linear(x_TK, weight.dense(), bias_N, norm=norm, residual_TN=residual_TN)

    def packed_gated_linear(
        self,
        x_TK: Tensor,
        gate_up: PackedWeight,
        bias_F: Tensor | None = None,
        *,
        norm: tuple[Tensor, float] | None = None,
    ) -> Tensor:
        """Compute `Backend.packed_gated_linear`."""
        return self.gated_linear(x_TK, gate_up.dense(), bias_F, norm=norm)

    @staticmethod
    def dequantize(weight: PackedWeight) -> Tensor:
        """Compute `Backend.dequantize`."""
        return weight.dense()

"""Formats of linear layers' weights, each as a `LinearMethod`."""

from __future__ import annotations

from tok_core.quantization.dense import DenseMethod
from tok_core.quantization.linear_method import LinearLayer, LinearMethod
from tok_core.quantization.weight_target import StoredTensor, WeightTarget

__all__ = ["DenseMethod", "LinearLayer", "LinearMethod", "StoredTensor", "WeightTarget"]

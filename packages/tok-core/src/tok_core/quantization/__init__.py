"""Define the weight formats of linear layers, each a `LinearMethod`, and choose the format of each layer."""

from __future__ import annotations

from tok_core.quantization.checkpoint_format import read_quantization
from tok_core.quantization.dense import DenseMethod
from tok_core.quantization.linear_method import FillTarget, LinearLayer, LinearMethod, MakeParameter
from tok_core.quantization.packed_layouts import GPTQMethod, PackQuantizedMethod
from tok_core.quantization.quantization_config import MIXTRAL_MATRICES, QuantizationConfig
from tok_core.quantization.scaled_method import ScaledMethod
from tok_core.quantization.weight_target import (
    FLOATS,
    KV_SCALES,
    NOT_FINITE,
    AllowedRange,
    BadTensor,
    StackedTarget,
    StoredTensor,
    WeightTarget,
)

__all__ = [
    "FLOATS",
    "KV_SCALES",
    "MIXTRAL_MATRICES",
    "NOT_FINITE",
    "AllowedRange",
    "BadTensor",
    "DenseMethod",
    "FillTarget",
    "GPTQMethod",
    "LinearLayer",
    "LinearMethod",
    "MakeParameter",
    "PackQuantizedMethod",
    "QuantizationConfig",
    "ScaledMethod",
    "StackedTarget",
    "StoredTensor",
    "WeightTarget",
    "read_quantization",
]

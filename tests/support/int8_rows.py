"""A complete weight format: int8 rows with scales. Write tiny models in it, and the dense models that equal them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from support.tiny_models import make_model
from tok_core.parallel import Slice
from tok_core.quantization import LinearLayer, LinearMethod, MakeParameter, WeightTarget


class Int8Rows(LinearMethod):
    """int8 weights with one float32 scale per row, dequantised before each GEMM."""

    def create(self, layer: LinearLayer, make: MakeParameter) -> None:
        rows = sum(part.count for part in layer.parts.values())
        layer.register_parameter("weight", make(rows, layer.inputs.count, dtype=torch.int8))
        layer.register_parameter("weight_scale", make(rows, 1, dtype=torch.float32))

    def targets(self, layer: LinearLayer) -> Iterator[tuple[str, WeightTarget]]:
        counts = [part.count for part in layer.parts.values()]
        views = zip(torch.split(layer.weight, counts), torch.split(scale(layer), counts), strict=True)
        for (name, rows), (weight, scales) in zip(layer.parts.items(), views, strict=True):
            yield f"{name}.weight", WeightTarget(weight, (rows, layer.inputs), ("I8",))
            yield f"{name}.weight_scale", WeightTarget(scales, (rows, Slice.whole(1)))

    def dense_weight(self, layer: LinearLayer) -> Tensor:
        return (layer.weight * scale(layer)).to(layer.dtype)

    def quantize(self, weight_FK: Tensor) -> dict[str, Tensor]:
        scale_F1 = weight_FK.float().abs().amax(1, keepdim=True) / 127
        return {"weight": (weight_FK / scale_F1).round().to(torch.int8), "weight_scale": scale_F1}


def scale(layer: LinearLayer) -> nn.Parameter:
    assert isinstance(layer, nn.Module)
    return layer.get_parameter("weight_scale")


INT8 = Int8Rows()


def write_models(kind: str, directory: Path, dense: tuple[str, ...] = ()) -> tuple[Path, Path]:
    """Write a model whose linear layers are int8, and the dense model that equals it; return their directories.

    Layers whose names contain one of `dense` stay dense.
    """
    int8, dequantised = (make_model(kind, directory / name, layers=3) for name in ("int8", "dequantised"))
    tensors = load_file(int8 / "model.safetensors")
    stored, equal = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if name.endswith(("_proj.weight", "lm_head.weight")) and not any(part in name for part in dense):
            stored |= {f"{name.removesuffix('weight')}{end}": part for end, part in INT8.quantize(weight).items()}
            equal[name] = stored[name] * stored[f"{name}_scale"]
    save_file(stored, int8 / "model.safetensors")
    save_file(equal, dequantised / "model.safetensors")
    return int8, dequantised

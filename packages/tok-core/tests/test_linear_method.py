"""A weight format is one class: int8 rows with scales, as a LinearMethod that no other code knows of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from support.sequences import Sequences
from support.tiny_models import make_model
from tok_core.model_config import read_config
from tok_core.models import CausalLM, build, load
from tok_core.models.layers import Linear
from tok_core.parallel import Slice
from tok_core.quantization import LinearLayer, LinearMethod, WeightTarget
from tok_core.quantization.linear_method import MakeParameter
from tok_kernels import choose

CPU = torch.device("cpu")
TOKENS = torch.randint(0, 512, (40,), generator=torch.Generator().manual_seed(1)).tolist()


@dataclass(frozen=True, slots=True)
class Int8Target(WeightTarget):
    """Quantises the rows of a tensor while it is loaded."""

    scale_F1: Tensor

    def fill(self, own: Tensor) -> bool:
        self.scale_F1.copy_(own.float().abs().amax(1, keepdim=True) / 127)
        self.view.copy_((own.float() / self.scale_F1).round())
        return True


class Int8Rows(LinearMethod):
    """int8 weights with one scale per row, dequantised before each GEMM."""

    def create(self, layer: LinearLayer, make: MakeParameter, dtype: torch.dtype) -> None:
        rows = sum(part.count for part in layer.parts.values())
        layer.register_parameter("weight", make(rows, layer.inputs.count, dtype=torch.int8))
        layer.register_parameter("scale", make(rows, 1, dtype=dtype))

    def targets(self, layer: LinearLayer) -> Iterator[tuple[str, WeightTarget]]:
        counts = [part.count for part in layer.parts.values()]
        views = zip(torch.split(layer.weight, counts), torch.split(scale(layer), counts), strict=True)
        for (name, rows), (weight, scales) in zip(layer.parts.items(), views, strict=True):
            yield f"{name}.weight", Int8Target(weight, (rows, layer.inputs), scales)

    def input_dtype(self, layer: LinearLayer) -> torch.dtype:
        return scale(layer).dtype

    def apply(
        self, layer: LinearLayer, x_TK: Tensor, norm: tuple[Tensor, float] | None, residual_TF: Tensor | None
    ) -> Tensor:
        if layer.gated:
            return layer.backend.gated_linear(x_TK, dequantised(layer), layer.bias, norm=norm)
        return layer.backend.linear(x_TK, dequantised(layer), layer.bias, norm=norm, residual_TN=residual_TF)

    def matmul(self, layer: LinearLayer, x_TK: Tensor, bias_F: Tensor | None = None) -> Tensor:
        return layer.backend.linear(x_TK, dequantised(layer), bias_F)

    def matmul_into(self, layer: LinearLayer, x_TK: Tensor, out_TF: Tensor) -> None:
        torch.mm(x_TK, dequantised(layer).t(), out=out_TF)

    def fused_weight(self, layer: LinearLayer) -> Tensor:
        return dequantised(layer).t()


def scale(layer: LinearLayer) -> nn.Parameter:
    assert isinstance(layer, nn.Module)
    return layer.get_parameter("scale")


def dequantised(layer: LinearLayer) -> Tensor:
    return layer.weight.to(scale(layer).dtype) * scale(layer)


def logits_of(model: CausalLM) -> Tensor:
    return Sequences(model, 1, 16).feed([(0, TOKENS)], range(len(TOKENS)))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_quantised_model_equals_the_dense_model_of_its_dequantised_weights(kind: str, tmp_path: Path) -> None:
    path = make_model(kind, tmp_path / kind)
    config, backend = read_config(path), choose(CPU)
    dense, quantised = (build(config, backend, CPU, torch.float32, linear_method=one) for one in (None, Int8Rows()))
    for model in (dense, quantised):
        load(model, path)
    exact = logits_of(dense)
    names = {name for name, module in quantised.named_modules() if isinstance(module, Linear)}
    assert {name.rpartition(".")[2] for name in names} >= {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    for name in names:
        own, theirs = quantised.get_submodule(name), dense.get_submodule(name)
        assert isinstance(own, Linear)
        assert own.weight.dtype == torch.int8
        assert isinstance(theirs, Linear)
        theirs.weight.data = dequantised(own)
    found = logits_of(quantised)
    assert torch.equal(found, logits_of(dense))
    assert not torch.equal(found, exact)


def test_targets_of_a_sharded_layer_name_the_rows_of_each_matrix() -> None:
    layer, method = nn.Module(), Int8Rows()
    layer.inputs = Slice(0, 8, 16)  # type: ignore[assignment]
    layer.parts = {"k_proj": Slice(4, 8, 8), "v_proj": Slice(2, 4, 4)}  # type: ignore[assignment]

    def make(*shape: int, dtype: torch.dtype) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)

    method.create(layer, make, torch.float32)  # type: ignore[arg-type]
    found = dict(method.targets(layer))  # type: ignore[arg-type]
    assert {name: (target.shape, list(target.view.shape)) for name, target in found.items()} == {
        "k_proj.weight": ([8, 16], [4, 8]),
        "v_proj.weight": ([4, 16], [2, 8]),
    }

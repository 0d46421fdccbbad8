"""Routers of quantised mixtures of experts; those that do not fit their config, or are corrupt, are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from support.expert_models import ROUTERS, changed, quantised, single
from support.parallel_models import logits_of, model_of
from support.quantized_models import SCHEMES
from support.tiny_models import make_model
from tok_core import ModelError
from tok_core.quantization import read_quantization


@pytest.fixture(scope="module")
def float8_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("float8")
    model = single(make_model("qwen3-moe", directory / "stacked"), directory / "single")
    return quantised(model, "fp8-dynamic", directory / "quantised")[0]


SCALE = "model.layers.1.mlp.experts.2.down_proj.weight_scale"


def put(value: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({SCALE: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put(torch.full((64, 1), torch.nan)), f"tensor {SCALE} has NaN; allowed: finite numbers, none negative, not"),
        (
            put(torch.full((64, 1), -2.0)),
            f"tensor {SCALE} has numbers from -2 to -2; allowed: finite numbers, none neg",
        ),
        (put(torch.zeros(64, 1)), f"tensor {SCALE} has numbers from 0 to 0; allowed: finite numbers, none negative"),
        (
            put(torch.ones(1, 64)),
            rf"tensor {SCALE} has shape \[1, 64\]; expected \[64, 1\], since \S+ is float8 with a",
        ),
        (
            put(torch.ones(64, 1).double()),
            f"tensor {SCALE} is stored as F64; supported: F32, F16, BF16, since .* float8",
        ),
        (lambda tensors: tensors.pop(SCALE), rf"missing tensors: {SCALE} \[64, 1\]$"),
    ],
)
def test_corrupt_scales_of_an_expert_are_refused_in_one_line(
    change: Callable[[dict[str, Tensor]], object], message: str, float8_experts: Path, tmp_path: Path
) -> None:
    path = changed(float8_experts, tmp_path / "corrupt", change)
    with pytest.raises(ModelError, match=message) as refused:
        model_of(path, quantization=read_quantization(path))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("ignore", "message"),
    [
        (
            ["lm_head"],
            r"tensor \S+mlp.gate.weight is stored as F32; supported: F8_E4M3, since \S+mlp.gate is float8 with",
        ),
        ([*ROUTERS, r"re:.*experts\."], r"weight_scale \[64, 1\] has no place in the model, whose \S+_proj is dense$"),
        (
            [*ROUTERS, "experts.2.down_proj"],
            r"gives \S+experts.2.down_proj another weight format than \S+experts.0.down_proj, .* and \d+ more; allowed",
        ),
    ],
)
def test_routers_and_experts_of_another_format_than_stored_are_named(
    ignore: list[str], message: str, float8_experts: Path, tmp_path: Path
) -> None:
    config = {**SCHEMES["fp8-dynamic"].config, "ignore": ignore}
    path = changed(float8_experts, tmp_path / "other", quantization_config=config, transformers_version="4.57.1")
    with pytest.raises(ModelError, match=message):
        model_of(path, quantization=read_quantization(path))


@pytest.mark.parametrize("scheme", ["fp8-dynamic", "fine-grained-fp8"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen2-moe"])
def test_routers_that_transformers_5_does_not_list_are_dense(kind: str, scheme: str, tmp_path: Path) -> None:
    """In transformers 5 "mlp.gate" has a class of its own, so what quantises linear layers does not list it."""
    path, dense = quantised(single(make_model(kind, tmp_path / "stacked"), tmp_path / "single"), scheme, tmp_path / "q")
    key = "ignore" if scheme == "fp8-dynamic" else "modules_to_not_convert"
    config = {**SCHEMES[scheme].config, key: ["lm_head", "mlp.shared_expert_gate"]}
    path = changed(path, tmp_path / "unlisted", quantization_config=config, transformers_version="5.2.0")
    model = model_of(path, quantization=read_quantization(path))
    assert all(map(np.array_equal, logits_of(model), logits_of(model_of(dense))))

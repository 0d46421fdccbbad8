"""`quantize_checkpoint` writes checkpoints that the engine loads, with weights rounded to the nearest value."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from support.parallel_models import model_of
from support.tiny_models import change_weights, make_model
from tok_core import InvalidField, ModelError
from tok_core.models import Linear
from tok_core.models.weights import SCHEMES, checkpoint_quantization, quantize_checkpoint
from tok_core.quantization import read_quantization

E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
E4M3 = E4M3[~E4M3.isnan()]
LARGEST_ERRORS = {
    "fp8-dynamic": 0.03,
    "fp8-block": 0.03,
    "int4-g128": 0.13,
    "int4-g64": 0.12,
}  # relative, of normal weights


def wide_model(directory: Path, **options: Any) -> Path:
    """Write a model whose matrices have multiples of 128 rows and columns."""
    return make_model("llama-untied", directory, hidden_size=128, head_dim=64, **options)


def dense_weights(path: Path) -> dict[str, Tensor]:
    model = model_of(path, quantization=read_quantization(path))
    linears = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    return {name: linear.method.dense_weight(linear) for name, linear in linears.items()}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantised_checkpoint_loads_with_the_errors_reported(scheme: str, shards: int, tmp_path: Path) -> None:
    path, out = wide_model(tmp_path / "dense", shards=shards), tmp_path / "rounded"
    reported = {tensor.name: tensor.error for tensor in quantize_checkpoint(path, out, scheme)}
    stored = {name: weight for file in path.glob("*.safetensors") for name, weight in load_file(file).items()}
    rounded = {name: weight for file in out.glob("*.safetensors") for name, weight in load_file(file).items()}
    assert set(reported) == set(stored)
    exact, found = dense_weights(path), dense_weights(out)
    squares = dict.fromkeys(exact, 0.0)
    for name, error in reported.items():
        if error is None:
            assert torch.equal(rounded[name], stored[name])
        else:
            assert 0 < error < LARGEST_ERRORS[scheme]
            layer, kind = name.removesuffix(".weight").rsplit(".", 1)
            stacked = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
            stacked |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
            squares[f"{layer}.{stacked.get(kind, kind)}"] += (error * stored[name].norm().item()) ** 2
    for name, expected in squares.items():
        assert (found[name] - exact[name]).norm().item() ** 2 == pytest.approx(expected, rel=1e-4)
    assert {file.name for file in out.iterdir()} == {file.name for file in path.iterdir()}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantised_weights_are_the_nearest_that_their_scales_allow(scheme: str, tmp_path: Path) -> None:
    path, out = wide_model(tmp_path / "dense"), tmp_path / "rounded"
    assert list(quantize_checkpoint(path, out, scheme))
    name = "model.layers.1.mlp.down_proj.weight"
    exact, scale = load_file(path / "model.safetensors")[name], load_file(out / "model.safetensors")[f"{name}_scale"]
    grid = torch.arange(-8.0, 8.0) if "int4" in scheme else E4M3
    assert scale.shape == {"fp8-block": (1, 1), "int4-g64": (128, 2)}.get(scheme, (128, 1))
    unit = scale.repeat_interleave(128 // scale.shape[0], 0).repeat_interleave(128 // scale.shape[1], 1)
    expected = grid[(exact[..., None] / unit[..., None] - grid).abs().argmin(-1)] * unit
    found = dense_weights(out)["model.layers.1.mlp.down_proj"]
    assert ((found - exact).abs() <= (expected - exact).abs() * 1.00001 + 1e-9).all()


FLOATS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
TOKENS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}
INTS = {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False, "strategy": "group"}
F32, F8, I32, I64 = torch.float32, torch.float8_e4m3fn, torch.int32, torch.int64


@pytest.mark.parametrize(
    ("scheme", "form", "weights", "inputs", "tensors"),
    [
        (
            *("fp8-dynamic", "float-quantized", {**FLOATS, "strategy": "channel"}, TOKENS),
            {"weight": (F8, 256, 128), "weight_scale": (F32, 256, 1)},
        ),
        (
            *("fp8-block", "float-quantized", {**FLOATS, "strategy": "block", "block_structure": [128, 128]}),
            {**TOKENS, "strategy": "group", "group_size": 128},
            {"weight": (F8, 256, 128), "weight_scale": (F32, 2, 1)},
        ),
        *(
            (
                *(f"int4-g{group}", "pack-quantized", {**INTS, "group_size": group}, None),
                {"weight_packed": (I32, 256, 16), "weight_scale": (F32, 256, 128 // group), "weight_shape": (I64, 2)},
            )
            for group in (128, 64)
        ),
    ],
)
def test_config_and_tensors_are_written_as_other_engines_read_them(
    scheme: str, form: str, weights: object, inputs: object, tensors: object, tmp_path: Path
) -> None:
    """vLLM 0.33 and compressed-tensors 0.17 were seen to read exactly these keys, names, shapes and dtypes."""
    path, out = wide_model(tmp_path / "dense"), tmp_path / "rounded"
    assert list(quantize_checkpoint(path, out, scheme))
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    assert json.loads((out / "config.json").read_text())["quantization_config"] == {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": form,
        "config_groups": {"group_0": {**group, "output_activations": None, "format": form}},
        "ignore": ["lm_head"],
    }
    stored, start = load_file(out / "model.safetensors"), "model.layers.0.self_attn.q_proj."
    found = {name.removeprefix(start): tensor for name, tensor in stored.items() if name.startswith(start)}
    assert {name: (tensor.dtype, *tensor.shape) for name, tensor in found.items()} == tensors


def test_other_files_are_copied_but_no_dense_weights(tmp_path: Path) -> None:
    path, out = wide_model(tmp_path / "dense"), tmp_path / "rounded"
    for name in ("tokenizer.json", "merges.txt", "pytorch_model.bin", "pytorch_model.bin.index.json", "model.gguf"):
        (path / name).write_text("{}")
    for name in ("additional_chat_templates/tool_use.jinja", "original/params.json"):
        (path / name).parent.mkdir()
        (path / name).write_text("{}")
    assert list(quantize_checkpoint(path, out, "fp8-dynamic"))
    written = {str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()}
    kept = {"config.json", "model.safetensors", "tokenizer.json", "merges.txt"}
    assert kept | {"additional_chat_templates/tool_use.jinja"} <= written
    assert not written & {"pytorch_model.bin", "pytorch_model.bin.index.json", "model.gguf", "original/params.json"}


def test_files_of_weights_have_the_permissions_of_the_dense_ones(tmp_path: Path) -> None:
    path, out = wide_model(tmp_path / "dense"), tmp_path / "rounded"
    (path / "model.safetensors").chmod(0o640)
    assert list(quantize_checkpoint(path, out, "fp8-dynamic"))
    assert (out / "model.safetensors").stat().st_mode & 0o777 == 0o640


def test_model_that_cannot_be_quantised_is_refused_before_writing(tmp_path: Path) -> None:
    path, out = wide_model(tmp_path / "dense"), tmp_path / "out"
    with pytest.raises(InvalidField, match="scheme is 'int3'; allowed: fp8-dynamic, fp8-block, int4-g128, int4-g64"):
        next(quantize_checkpoint(path, out, "int3"))
    with pytest.raises(InvalidField, match=r"out is .*; allowed: a directory that does not exist yet"):
        next(quantize_checkpoint(path, path, "fp8-dynamic"))
    assert list(quantize_checkpoint(path, tmp_path / "fp8", "fp8-dynamic"))
    with pytest.raises(ModelError, match="is quantised already"):
        next(quantize_checkpoint(tmp_path / "fp8", out, "fp8-dynamic"))
    small = make_model("llama", tmp_path / "small")
    with pytest.raises(ModelError, match=r"_proj.weight: is \[\d+, 64\]; allowed: multiples of \[1, 128\]"):
        list(quantize_checkpoint(small, out, "int4-g128"))
    assert not out.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weight: weight * torch.nan, "has NaN or infinities, which cannot be rounded"),
        (lambda weight: weight.to(torch.int8), "is stored as I8; allowed: F32, F16, BF16"),
        (lambda weight: weight[None].contiguous(), r"has shape \[1, 128, 128\]; allowed: 2 axes"),
    ],
    ids=["nan", "int8", "axes"],
)
def test_weights_that_cannot_be_rounded_are_named(
    change: Callable[[Tensor], Tensor], message: str, tmp_path: Path
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    path = change_weights(wide_model(tmp_path / "dense"), lambda weights: weights.update({name: change(weights[name])}))
    with pytest.raises(ModelError, match=f"^{name}: {message}"):
        list(quantize_checkpoint(path, tmp_path / "out", "fp8-dynamic"))
    assert not (tmp_path / "out").exists()


def test_error_of_a_matrix_of_zeros_is_zero(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    path = change_weights(wide_model(tmp_path / "dense"), lambda weights: weights[name].zero_())
    errors = {tensor.name: tensor.error for tensor in quantize_checkpoint(path, tmp_path / "out", "fp8-dynamic")}
    assert errors[name] == 0


def test_output_that_cannot_be_written_is_named_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise SafetensorError("No space left on device")

    path, out = wide_model(tmp_path / "dense"), tmp_path / "file" / "out"
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match=f"^{out}: cannot be written: Not a directory"):
        list(quantize_checkpoint(path, out, "fp8-dynamic"))
    monkeypatch.setattr(checkpoint_quantization, "save_file", fail)
    with pytest.raises(ModelError, match="cannot be written: No space left on device"):
        list(quantize_checkpoint(path, tmp_path / "out", "fp8-dynamic"))
    assert not (tmp_path / "out").exists()


def test_interrupted_quantisation_leaves_no_output(tmp_path: Path) -> None:
    tensors = quantize_checkpoint(wide_model(tmp_path / "dense"), tmp_path / "out", "fp8-dynamic")
    next(tensors)
    assert (tmp_path / "out").exists()
    tensors.close()
    assert not (tmp_path / "out").exists()

"""Checkpoints in the weight formats of other libraries compute what their dequantised weights compute."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.parallel_models import CPU, PROMPT, chained_logits, compute, greedy, logits_of, model_of, tokens_of
from support.quantized_models import GROUP, KV_CACHE, SCHEMES, write_quantized
from support.ranks import run_ranks
from support.tiny_models import change_weights, make_model
from tok_core import ModelError
from tok_core.config import all_coordinates
from tok_core.model_config import read_config
from tok_core.models import CausalLM, Linear, build, fill_dummy_weights
from tok_core.quantization import DenseMethod, QuantizationConfig, read_quantization
from tok_core.quantization.packed_layouts import PackQuantizedMethod
from tok_core.quantization.scaled_method import ScaledMethod
from tok_kernels import choose


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantised_checkpoint_has_the_logits_of_its_dequantised_weights(scheme: str, tmp_path: Path) -> None:
    path, dense = write_quantized("qwen2" if "int" in scheme else "llama-untied", tmp_path, scheme)
    model = model_of(path, quantization=read_quantization(path))
    assert all(map(np.array_equal, logits_of(model), logits_of(model_of(dense))))


def linears(model: CausalLM) -> dict[str, Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Linear)}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_rank_holds_its_part_of_the_dequantised_weights(scheme: str, tmp_path: Path) -> None:
    path, dense = write_quantized("llama-untied", tmp_path, scheme)
    for coordinates in all_coordinates(1, 2):
        quantised = linears(model_of(path, coordinates, quantization=read_quantization(path)))
        for name, linear in linears(model_of(dense, coordinates)).items():
            assert torch.equal(quantised[name].method.dense_weight(quantised[name]), linear.weight), name


def test_ranks_of_a_quantised_model_compute_what_the_dense_model_does(tmp_path: Path) -> None:
    path, dense = write_quantized("llama-untied", tmp_path, "awq")
    alone = model_of(dense)
    expected, in_chunks, tokens = logits_of(alone), chained_logits([alone]), greedy(alone, tokens_of(PROMPT), 6)
    for [of_rank] in run_ranks(all_coordinates(1, 2), compute, [path], (0, 1000), 6, read_quantization(path)):
        logits, chained, chosen, _ = of_rank
        assert chosen == tokens
        for found, reference in [*((one, expected) for one in logits), *((one, in_chunks) for one in chained)]:
            for a, b in zip(found, reference, strict=True):
                assert np.abs(a - b).max(initial=0) <= 5e-5 * np.abs(b).max(initial=0)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_dummy_weights_are_rounded_to_the_nearest_value_of_the_format(scheme: str, tmp_path: Path) -> None:
    path, _ = write_quantized("llama-untied", tmp_path, scheme)
    quantization = read_quantization(path)
    quantised, dense = (
        build(read_config(path), choose(CPU), CPU, torch.float32, quantization=one)
        for one in (quantization, QuantizationConfig())
    )
    fill_dummy_weights(quantised)
    fill_dummy_weights(dense)
    layers = [linears(quantised), linears(dense)]
    for name, linear in layers[0].items():
        if name != "lm_head":
            found, exact = (one[name].method.dense_weight(one[name]) for one in layers)
            unit = linear.get_parameter("weight_scale").amax()
            fp8 = isinstance(linear.method, ScaledMethod) and linear.method.dtype.is_floating_point
            allowed = exact.abs() / 16 if fp8 else torch.tensor(0.0)  # float8 has three bits after the first
            assert ((found - exact).abs() <= allowed + 0.501 * unit * (2**-9 if fp8 else 1)).all()


def with_config(path: Path, changes: dict[str, object]) -> Path:
    """Change keys of `quantization_config`, those of its only group if they are there."""
    config = json.loads((path / "config.json").read_text())
    quantization = config["quantization_config"]
    group = quantization.get("config_groups", {}).get("group_0", {})
    for key, value in changes.items():
        parent, _, key = key.rpartition(".")
        (group[parent] if parent else group if key == "targets" else quantization)[key] = value
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("scheme", "changes", "message"),
    [
        (
            "awq",
            {"quant_method": "exl2"},
            "quant_method is 'exl2'; allowed: fp8, fbgemm_fp8, compressed-tensors, awq, gptq",
        ),
        ("awq", {"bits": 3}, "bits is 3; allowed: 4"),
        ("awq", {"zero_point": False}, "zero_point is False; allowed: true"),
        ("awq", {"version": "gemv"}, 'version is \'gemv\'; allowed: "gemm" or "GEMM"'),
        ("awq", {"method": "gptq"}, "method is 'gptq'; allowed: \"awq\""),
        ("gptq", {"data_type": "nv_fp"}, "data_type is 'nv_fp'; allowed: \"int\""),
        ("awq", {"rotation": 2}, "rotation is not known; allowed: bits, checkpoint_format"),
        ("gptq", {"bits": 3}, "bits is 3; allowed: 4, 8"),
        ("gptq", {"lm_head": True}, "lm_head is True; allowed: false"),
        ("awq", {"dynamic": {"-:.*": {}}}, "dynamic is {.*}; allowed: {}"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; allowed: gptq, gptq_v2"),
        ("fp8-per-matrix", {"activation_scheme": "none"}, "activation_scheme is 'none'; allowed: dynamic, static"),
        ("fine-grained-fp8", {"scale_fmt": "ue8m0"}, "scale_fmt is 'ue8m0'; allowed: \"float\""),
        (
            "fine-grained-fp8",
            {"weight_block_size": [128]},
            r"weight_block_size is \[128\]; allowed: a list of two positive",
        ),
        ("int4", {"sparsity_config": {"format": "2:4"}}, "sparsity_config: format is '2:4'; allowed: dense"),
        ("int4", {"sparsity_config": {"targets": []}}, "sparsity_config: format is None; allowed: dense"),
        ("int4", {"sparsity_config": {"format": "dense", "mask": 1}}, "sparsity_config: mask is not known"),
        ("int4", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme: type is None; allowed: float"),
        ("int4", {"kv_cache_scheme": {"type": "float", "num_bits": 4}}, "kv_cache_scheme: num_bits is 4; allowed: 8"),
        ("int4", {"kv_cache_scheme": {"type": "int"}}, "kv_cache_scheme: type is 'int'; allowed: \"float\""),
        ("int4", {"kv_cache_scheme": KV_CACHE | {"dynamic": True}}, "dynamic is True; allowed: false"),
        ("int4", {"kv_cache_scheme": KV_CACHE | {"symmetric": False}}, "symmetric is False; allowed: true"),
        (
            "int4",
            {"kv_cache_scheme": KV_CACHE | {"strategy": "token"}},
            "strategy is 'token'; allowed: tensor, attn_head",
        ),
        ("int4", {"kv_cache_scheme": KV_CACHE | {"offset": 1}}, "kv_cache_scheme: offset is not known"),
        ("fp8-per-matrix", {"kv_cache_scheme": "dynamic"}, "kv_cache_scheme is 'dynamic'; allowed: \"static\""),
        ("int4", {"config_groups": {}}, "config_groups is None; allowed: a JSON object with at least one group"),
        ("int4", {"targets": []}, r"group_0: targets is \[\]; allowed: a list with at least one layer"),
        (
            "int4",
            {"targets": ["re:(_proj"]},
            r"targets is 're:\(_proj'; allowed: re: and a regular expression \(missing",
        ),
        (
            "int4",
            {"ignore": ["lm_head", "re:*"]},
            r"ignore is 're:\*'; allowed: re: and a regular expression \(nothing",
        ),
        ("awq", {"modules_to_not_convert": ["re:["]}, r"modules_to_not_convert is 're:\['; allowed: re: and a regular"),
        ("int4", {"format": "marlin-24"}, "format is 'marlin-24'; allowed: float-quantized, int-quantized"),
        ("int4", {"weights.num_bits": 2}, "num_bits is 2; allowed: 4, 8, with format pack-quantized"),
        ("int4", {"weights.actorder": "group"}, 'actorder is \'group\'; allowed: false or "weight" or "static"'),
        (
            "int8",
            {"weights.strategy": "group"},
            "strategy is 'group'; allowed: tensor, channel, with format int-quantized",
        ),
        ("int8", {"weights.symmetric": False}, "symmetric is False; allowed: true, with format int-quantized"),
        ("int8", {"input_activations.num_bits": 4}, "num_bits is 4; allowed: 8"),
    ],
)
def test_format_that_is_not_computed_is_refused_by_the_name_of_its_key(
    scheme: str, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = with_config(write_quantized("llama", tmp_path, scheme)[0], changes)
    with pytest.raises(ModelError, match=message):
        read_quantization(path)


@pytest.mark.parametrize(
    ("algorithms", "message"),
    [
        ({"quant_algo": "FP8", "kv_cache_quant_algo": None}, "quant_algo is 'FP8'; allowed: null"),
        ({"quant_algo": None, "kv_cache_quant_algo": "FP8"}, "kv_cache_quant_algo is 'FP8'; allowed: null"),
        ({"quant_algo": None, "kv_cache_quant_algo": None}, None),
    ],
)
def test_formats_that_modelopt_names_in_a_file_of_its_own_are_refused(
    algorithms: dict[str, object], message: str | None, tmp_path: Path
) -> None:
    path = make_model("llama", tmp_path / "model")
    (path / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": algorithms}))
    if message is None:
        assert read_quantization(path) == QuantizationConfig()
        return
    with pytest.raises(ModelError, match=f"hf_quant_config.json: quantization: {message}, since formats of ModelOpt"):
        read_quantization(path)


@pytest.mark.parametrize(
    ("scheme", "keys"),
    [
        ("gptq", {"method": "gptq", "format": "gptq", "checkpoint_format": "gptq", "pack_dtype": "int32", "meta": {}}),
        (
            "awq",
            {"method": "awq", "format": "gemm", "checkpoint_format": "gemm", "desc_act": False, "lm_head": False},
        ),
        ("fp8-dynamic", {"sparsity_config": {"format": "dense", "global_sparsity": 0.14, "ignore": []}}),
        ("gptq", {"hyb_act": False, "meta": {"quantizer": ["gptqmodel:2.2.0"]}, "lm_head": False}),
        ("gptq", {"provider": "auto-round", "autoround_version": "0.5.1", "iters": 200, "data_type": "int"}),
    ],
    ids=["GPTQModel", "AWQ by GPTQModel", "llm-compressor", "GPTQModel 2", "AutoRound"],
)
def test_keys_that_change_no_result_are_accepted(scheme: str, keys: dict[str, object], tmp_path: Path) -> None:
    path, _ = write_quantized("llama", tmp_path, scheme)
    without = read_quantization(path)
    assert read_quantization(with_config(path, keys)) == without


def fill(position: int | None, value: float) -> Callable[[Tensor], Tensor]:
    """Return a function that sets an entry, counted in rows, or all of them (None)."""

    def change(tensor: Tensor) -> Tensor:
        tensor.view(-1)[position if position is not None else slice(None)] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("scheme", "end", "change", "message"),
    [
        (
            "fp8-dynamic",
            "weight_scale",
            fill(1, math.nan),
            "has NaN; allowed: finite numbers, none negative, not all 0",
        ),
        (
            "fp8-dynamic",
            "weight_scale",
            fill(1, -2.0),
            r"has numbers from -2 to 0\.\d+; allowed: finite numbers, none neg",
        ),
        (
            "fp8-dynamic",
            "weight_scale",
            fill(None, 0.0),
            "has numbers from 0 to 0; allowed: finite numbers, none negative",
        ),
        (
            "fp8-static",
            "weight_scale",
            fill(0, math.inf),
            "has numbers from inf to inf; allowed: finite numbers, none neg",
        ),
        (
            "fp8-per-matrix",
            "weight_scale",
            fill(0, 0.0),
            "has numbers from 0 to 0; allowed: finite numbers, none negative",
        ),
        ("fine-grained-fp8", "weight_scale_inv", fill(2, math.nan), "has NaN; allowed: finite numbers, none negative"),
        ("int8", "weight_scale", fill(None, 0.0), "has numbers from 0 to 0; allowed: finite numbers, not all 0"),
        (
            "int4",
            "weight_scale",
            fill(3, -math.inf),
            r"has numbers from -inf to 0\.\d+; allowed: finite numbers, not all",
        ),
        ("awq", "scales", fill(3, math.nan), "has NaN; allowed: finite numbers, not all 0"),
        ("gptq", "scales", fill(5, math.inf), r"has numbers from 0\.\d+ to inf; allowed: finite numbers, not all 0"),
        (
            "gptq-desc-act",
            "g_idx",
            fill(7, 4),
            "has numbers from 0 to 4; allowed: integers from 0 to 3, the last group of",
        ),
        ("gptq-desc-act", "g_idx", fill(7, -1), "has numbers from -1 to 3; allowed: integers from 0 to 3"),
        ("fp8-dynamic", "weight_scale", Tensor.flatten, r"has shape \[64\]; expected \[64, 1\]"),
        ("int4", "weight_scale", Tensor.int, "is stored as I32; supported: F32, F16, BF16"),
        ("awq", "qweight", Tensor.float, "is stored as F32; supported: I32"),
    ],
)
def test_corrupt_tensor_is_refused_by_its_name(
    scheme: str, end: str, change: Callable[[Tensor], Tensor], message: str, tmp_path: Path
) -> None:
    path, _ = write_quantized("llama", tmp_path, scheme)
    name = f"model.layers.1.mlp.down_proj.{end}"

    def corrupt(weights: dict[str, Tensor]) -> None:
        weights[name] = change(weights[name])

    change_weights(path, corrupt)
    with pytest.raises(ModelError, match=f"model.safetensors: tensor {name} {message}"):
        model_of(path, quantization=read_quantization(path))


@pytest.mark.parametrize(
    ("stored", "named", "message"),
    [
        (
            None,
            "fp8-dynamic",
            r"weight is stored as F32; supported: F8_E4M3, since \S+_proj is float8 with a scale for",
        ),
        (
            None,
            "int4",
            r"weight \[64, 128\] has no place in the model, whose \S+_proj is int4 with a scale for each 32",
        ),
        ("fp8-dynamic", None, r"weight_scale \[64, 1\] has no place in the model, whose model.layers.0.\S+ is dense$"),
        (
            "fp8-dynamic",
            "int8",
            "weight is stored as F8_E4M3; supported: I8, since model.layers.0.* is int8 with a scale",
        ),
        (
            "int8-rows-packed",
            "int4",
            r"has shape \[64, 32\]; expected \[64, 16\], since \S+ is int4 with a scale for each",
        ),
    ],
)
def test_tensors_of_another_format_than_configured_name_both_formats(
    stored: str | None, named: str | None, message: str, tmp_path: Path
) -> None:
    path = write_quantized("llama", tmp_path, stored or "int8")[0 if stored else 1]
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = dict(SCHEMES[named].config) if named else None
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message) as refused:
        model_of(path, quantization=read_quantization(path))
    assert "\n" not in str(refused.value)


def test_missing_scale_is_named_with_its_shape(tmp_path: Path) -> None:
    path, _ = write_quantized("llama", tmp_path, "fp8-dynamic")
    change_weights(path, lambda weights: weights.pop("model.layers.1.mlp.down_proj.weight_scale"))
    with pytest.raises(ModelError, match=r"missing tensors: model.layers.1.mlp.down_proj.weight_scale \[64, 1\]"):
        model_of(path, quantization=read_quantization(path))


@pytest.mark.parametrize(
    ("scheme", "value", "message"),
    [
        ("gptq", 0.0, None),
        ("gptq", -0.5, r"o_proj.bias \[64\] has no place in the model, whose \S+o_proj is int4"),
        ("int4", 0.0, r"o_proj.bias \[64\] has no place in the model, whose \S+o_proj is int4"),
    ],
)
def test_only_gptqs_biases_of_zeros_may_lack_a_place(
    scheme: str, value: float, message: str | None, tmp_path: Path
) -> None:
    path, dense = write_quantized("qwen2", tmp_path, scheme)
    bias = torch.full((64,), value, dtype=torch.float16)
    change_weights(path, lambda weights: weights.update({"model.layers.1.self_attn.o_proj.bias": bias}))
    if message is not None:
        with pytest.raises(ModelError, match=message):
            model_of(path, quantization=read_quantization(path))
        return
    model = model_of(path, quantization=read_quantization(path))
    assert all(map(np.array_equal, logits_of(model), logits_of(model_of(dense))))


@pytest.mark.parametrize("scheme", ["int4", "int8"])
def test_integers_may_have_negative_scales_and_single_scales_may_be_zero(scheme: str, tmp_path: Path) -> None:
    path, dense = write_quantized("llama", tmp_path, scheme)
    name = "model.layers.1.mlp.down_proj"

    def change(scale: Tensor) -> Tensor:
        scale[::3] *= -1
        scale[1] = 0
        return scale

    change_weights(path, lambda weights: change(weights[f"{name}.weight_scale"]))
    change_weights(dense, lambda weights: change(weights[f"{name}.weight"]))
    model = model_of(path, quantization=read_quantization(path))
    assert all(map(np.array_equal, logits_of(model), logits_of(model_of(dense))))


def test_layers_of_two_groups_have_the_format_of_the_most_exact_target(tmp_path: Path) -> None:
    path, _ = write_quantized("llama", tmp_path, "int4")
    names = "int4", "int8-rows-packed", "int4-zero-points"
    configs: list[Any] = [SCHEMES[name].config for name in names]
    four, eight, with_zero_points = (config["config_groups"]["group_0"] for config in configs)
    groups = {
        "a": four,
        "b": {**eight, "targets": [r"re:.*\.down_proj$"]},
        "c": {**with_zero_points, "targets": ["model.layers.1.mlp.down_proj"]},
    }
    found = read_quantization(with_config(path, {"config_groups": groups, "ignore": ["lm_head", r"re:.*layers\.2\."]}))
    methods = [found.method_of([f"model.layers.{layer}.mlp.down_proj"]) for layer in range(3)]
    assert methods[:2] == [PackQuantizedMethod(8, None), PackQuantizedMethod(4, GROUP, zero_points=True)]
    assert isinstance(methods[2], DenseMethod)
    assert found.method_of(["model.layers.0.mlp.gate_proj"]) == PackQuantizedMethod(4, GROUP)
    assert str(found) == (
        "int4 with a scale for each 32 columns; int4 with a scale and a zero point for each 32 columns: "
        r"model.layers.1.mlp.down_proj; int8 with a scale for each row: re:.*\.down_proj$; "
        r"dense: lm_head, re:.*layers\.2\."
    )


@pytest.mark.parametrize("entry", ["model.layers.1.", "layers.1", "model.layers.1.mlp."])
def test_ignored_layers_may_end_with_a_dot(entry: str) -> None:
    quantization = QuantizationConfig(PackQuantizedMethod(), (entry,))
    methods = [quantization.method_of([f"model.layers.{layer}.mlp.down_proj"]) for layer in (1, 11)]
    assert [isinstance(method, DenseMethod) for method in methods] == [True, False]


@pytest.mark.parametrize("entry", ["block_sparse_moe.experts.3.w2", r"re:.*\.block_sparse_moe\.experts\.3\.w2$"])
def test_ignored_layers_may_have_mixtrals_names(entry: str) -> None:
    quantization = QuantizationConfig(PackQuantizedMethod(), (entry,))
    methods = [quantization.method_of([f"model.layers.0.mlp.experts.{name}"]) for name in ("3.down_proj", "3.up_proj")]
    assert [isinstance(method, DenseMethod) for method in methods] == [True, False]


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ("fine-grained-fp8", r"o_proj: groups of 32 columns share a scale, .* cuts the 64 columns at 0 and 16"),
        ("awq", "o_proj: groups of 32 columns share a scale"),
    ],
)
def test_ranks_that_cut_a_group_of_columns_are_refused(scheme: str, message: str, tmp_path: Path) -> None:
    path, _ = write_quantized("llama", tmp_path, scheme)
    with pytest.raises(ModelError, match=message):
        build(
            read_config(path),
            choose(CPU),
            CPU,
            torch.float32,
            next(all_coordinates(1, 4)),
            None,
            read_quantization(path),
        )


def test_dense_checkpoint_has_no_quantised_layers(tmp_path: Path) -> None:
    assert read_quantization(make_model("llama", tmp_path / "dense")) == QuantizationConfig()

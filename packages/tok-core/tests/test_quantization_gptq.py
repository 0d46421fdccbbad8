"""GPTQ checkpoints whose layers differ: the keys `dynamic` and `modules_in_block_to_quantize`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from support.expert_models import quantised, single
from support.parallel_models import CPU, logits_of, model_of
from support.quantized_models import packed, write_quantized
from support.tiny_models import make_model
from tok_core import ModelError
from tok_core.config import all_coordinates
from tok_core.model_config import read_config
from tok_core.models import Linear, build
from tok_core.quantization import DenseMethod, GPTQMethod, QuantizationConfig, read_quantization
from tok_kernels import choose

# Layer 0: 8 bits, a row a group. Layer 1: groups of 16 columns, and act_order in o_proj. Layer 2: a dense MLP.
RULES: dict[str, object] = {
    r"+:model\.layers\.0\.": {"bits": 8, "group_size": -1, "sym": False},
    r".*\.1\.self_attn\.o_proj$": {"group_size": 16, "desc_act": True, "damp_percent": 0.1, "mse": 2.0},
    r"+:.*layers\.1\.": {"group_size": 16},
    r"-:.*layers\.2\.mlp": {},
}
MADE = {
    "layers.0.": packed("gptq", 8, None),
    "layers.1.self_attn.o_proj": packed("gptq", 4, 16, ordered=True),
    "layers.1.": packed("gptq", 4, 16),
}


def with_keys(path: Path, **keys: object) -> Path:
    """Add keys to `quantization_config`."""
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= keys
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Write a model whose layers have the formats of RULES, and its dense equal."""
    directory = tmp_path_factory.mktemp("mixed")
    path, dense = write_quantized("llama-untied", directory, "gptq", dense=("layers.2.mlp",), others=MADE)
    return with_keys(path, dynamic=RULES), dense


def test_layers_with_dynamic_settings_have_the_dense_models_logits(mixed: tuple[Path, Path]) -> None:
    path, dense = mixed
    model = model_of(path, quantization=read_quantization(path))
    assert all(map(np.array_equal, logits_of(model), logits_of(model_of(dense))))


def test_ranks_and_stages_hold_their_part_of_layers_that_differ(mixed: tuple[Path, Path]) -> None:
    path, dense = mixed
    for coordinates in all_coordinates(2, 2):
        quantised_model, whole = (
            model_of(one, coordinates, quantization=read_quantization(one)) for one in (path, dense)
        )
        for name, linear in whole.named_modules():
            if isinstance(linear, Linear):
                other = quantised_model.get_submodule(name)
                assert isinstance(other, Linear)
                assert torch.equal(other.method.dense_weight(other), linear.weight), name


def gptq(path: Path, **keys: object) -> QuantizationConfig:
    """Return the formats of a model in int4 with groups of 64 columns and act_order, with other `keys`."""
    path.mkdir()
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True, "sym": True} | keys
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": quantization}))
    return read_quantization(path)


BASE = GPTQMethod(bits=4, group=64, act_order=True)


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({r".*down": {"bits": 8}}, GPTQMethod(bits=8, group=64, act_order=True)),
        ({r"+:.*down": {"group_size": -1}}, GPTQMethod(bits=4, group=None, act_order=True)),
        ({r".*down": {"desc_act": False}}, GPTQMethod(bits=4, group=64)),
        ({r".*down": {"bits": None, "sym": False, "pack_dtype": "int32"}}, BASE),
        ({r".*down": {}, r".*": {"bits": 8}}, BASE),
        ({r".*mlp": {"bits": 8}, r".*down": {"group_size": 32}}, GPTQMethod(bits=8, group=64, act_order=True)),
        ({r".*down": {"bits": 8}, r"-:.*mlp": {}}, DenseMethod()),
        ({r"mlp\.down_proj": {"bits": 8}, r"-:down_proj": {}}, BASE),
        ({r"model\.layers\.3\.mlp\.down": {"bits": 8}}, GPTQMethod(bits=8, group=64, act_order=True)),
    ],
    ids=[
        "other settings stay",
        "group_size",
        "desc_act",
        "nothing changes",
        "a rule of no settings keeps later ones away",
        "the first rule counts",
        "dense comes first",
        "from the start of the name",
        "not to the end of the name",
    ],
)
def test_dynamic_rule_that_counts_gives_a_layer_its_format(
    rules: dict[str, object], expected: GPTQMethod | DenseMethod, tmp_path: Path
) -> None:
    found = gptq(tmp_path / "model", dynamic=rules).method_of(["model.layers.3.mlp.down_proj"])
    assert str(found) == str(expected)
    assert isinstance(expected, DenseMethod) or found == expected


def test_dynamic_rules_for_all_layers_leave_the_lm_head_dense(tmp_path: Path) -> None:
    found = gptq(tmp_path / "model", dynamic={".*": {"bits": 8}})
    assert isinstance(found.method_of(["lm_head"]), DenseMethod)


ATTENTION = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]


@pytest.mark.parametrize(
    "modules",
    [[ATTENTION, ["mlp.down_proj"]], [*ATTENTION, "mlp.down_proj"]],
    ids=["lists", "names"],
)
@pytest.mark.parametrize("rules", [None, {r"-:.*layers\.1\.mlp\.down_proj": {}}], ids=["alone", "with dynamic"])
def test_modules_in_block_to_quantize_leaves_all_other_layers_dense(
    rules: dict[str, object] | None, modules: list[object], tmp_path: Path
) -> None:
    left = ("o_proj", "gate_proj", "up_proj", *(["layers.1.mlp.down_proj"] if rules else []))
    path, dense = write_quantized("qwen2", tmp_path, "gptq", dense=left)
    with_keys(path, modules_in_block_to_quantize=modules, dynamic=rules)
    model = model_of(path, quantization=read_quantization(path))
    assert all(map(np.array_equal, logits_of(model), logits_of(model_of(dense))))


def test_modules_in_block_to_quantize_are_ends_of_names(tmp_path: Path) -> None:
    found = gptq(tmp_path / "model", modules_in_block_to_quantize=[[], ["self_attn", "3.mlp.down_proj"]])
    assert found.method_of(["model.layers.3.mlp.down_proj"]) == BASE
    for name in ("model.layers.2.mlp.down_proj", "model.layers.3.self_attn.o_proj", "lm_head"):
        assert isinstance(found.method_of([name]), DenseMethod), name


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"dynamic": []}, r"dynamic is \[\]; allowed: a JSON object$"),
        ({"dynamic": {"-:.*": None}}, r"dynamic: -:\.\* is None; allowed: a JSON object$"),
        ({"dynamic": {".*": 8}}, r"dynamic: \.\* is 8; allowed: a JSON object$"),
        ({"dynamic": {"-:*": {}}}, r"dynamic is '-:\*'; allowed: -: and a regular expression \(nothing to repeat"),
        ({"dynamic": {"(": {}}}, r"dynamic is '\('; allowed: a regular expression \(missing \)"),
        ({"dynamic": {"a{9999999999}": {}}}, r"allowed: a regular expression \(the repetition number is too large"),
        ({"dynamic": {"+:.*": {"bits": 3}}}, r"dynamic: \+:\.\*: bits is 3; allowed: 4, 8$"),
        ({"dynamic": {".*": {"bits": "8"}}}, r"dynamic: \.\*: bits is '8'; allowed: an integer of at least 1$"),
        ({"dynamic": {".*": {"group_size": 0}}}, r"dynamic: \.\*: group_size is 0; allowed: -1 or a positive integer$"),
        ({"dynamic": {".*": {"desc_act": 1}}}, r"dynamic: \.\*: desc_act is 1; allowed: true or false$"),
        ({"dynamic": {".*": {"sym": "yes"}}}, r"dynamic: \.\*: sym is 'yes'; allowed: true or false$"),
        ({"dynamic": {".*": {"pack_dtype": "int8"}}}, "pack_dtype is 'int8'; allowed: \"int32\"$"),
        ({"dynamic": {".*": {"method": "awq"}}}, "method is 'awq'; allowed: \"gptq\"$"),
        ({"dynamic": {".*": {"adapter": {}}}}, r"dynamic: \.\*: adapter is not known; allowed: bits, damp_auto_incre"),
        ({"modules_in_block_to_quantize": "mlp"}, "modules_in_block_to_quantize is 'mlp'; allowed: a list of names of"),
        ({"modules_in_block_to_quantize": [[]]}, r"is \[\[\]\]; allowed: .* of lists of them, with at least one name$"),
        ({"modules_in_block_to_quantize": [["mlp", 3]]}, r"is \[\['mlp', 3\]\]; allowed: a list of names of layers"),
    ],
)
def test_layer_settings_that_are_not_computed_are_refused_by_name(
    keys: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message) as refused:
        gptq(tmp_path / "model", **keys)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("keys", "others", "same"),
    [
        ({"dynamic": {r".*\.v_proj": {"bits": 8}}}, "v_proj", "q_proj, model.layers.0.self_attn.k_proj"),
        ({"dynamic": {r".*\.v_proj": {"desc_act": True}}}, "v_proj", "q_proj, model.layers.0.self_attn.k_proj"),
        ({"dynamic": {r"-:.*\.up_proj": {}}}, "up_proj", "gate_proj"),
        (
            {"modules_in_block_to_quantize": [["self_attn.k_proj", "self_attn.v_proj"]]},
            "k_proj, model.layers.0.self_attn.v_proj",
            "q_proj",
        ),
    ],
)
def test_layers_that_are_computed_as_one_are_refused_if_they_differ(
    keys: dict[str, object], others: str, same: str, tmp_path: Path
) -> None:
    path, _ = write_quantized("llama", tmp_path, "gptq")
    with_keys(path, **keys)
    (path / "model.safetensors").unlink()
    message = rf"gives \S+\.{others} another weight format than \S+\.{same}; allowed: one format, since they are comp"
    with pytest.raises(ModelError, match=message):
        build(read_config(path), choose(CPU), CPU, torch.float32, quantization=read_quantization(path))


@pytest.mark.parametrize("left", ["down_proj", "experts.", None], ids=["down_proj", "experts", "none"])
def test_experts_with_dynamic_settings_have_the_dense_models_logits(left: str | None, tmp_path: Path) -> None:
    path = single(make_model("qwen2-moe", tmp_path / "model"), tmp_path / "single")
    rules = {r".*gate": {"bits": 8}, r".*up_proj": {"bits": 8}}
    others = {"gate_proj": packed("gptq", 8), "up_proj": packed("gptq", 8)}
    rules |= {f"-:.*{left}": {}} if left else {}
    found, dense = quantised(path, "gptq", tmp_path / "mixed", left or "", others, dynamic=rules)
    model = model_of(found, quantization=read_quantization(found))
    for a, b in zip(logits_of(model), logits_of(model_of(dense)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max(initial=1))


def test_modules_in_block_to_quantize_names_mixtrals_experts(tmp_path: Path) -> None:
    path = single(make_model("mixtral", tmp_path / "model"), tmp_path / "single")
    experts = json.loads((path / "config.json").read_text())["num_local_experts"]
    modules = [[f"block_sparse_moe.experts.{expert}.{end}" for expert in range(experts)] for end in ("w1", "w3")]
    found, dense = quantised(
        path, "gptq", tmp_path / "mixed", ".w2.", modules_in_block_to_quantize=[ATTENTION, *modules]
    )
    with pytest.raises(ModelError, match=r"o_proj\.\S+ .* has no place in the model, whose \S+o_proj is dense"):
        model_of(found, quantization=read_quantization(found))
    with_keys(found, modules_in_block_to_quantize=[[*ATTENTION, "self_attn.o_proj"], *modules])
    model = model_of(found, quantization=read_quantization(found))
    for a, b in zip(logits_of(model), logits_of(model_of(dense)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max(initial=1))


def test_dynamic_rules_for_mixtral_are_refused(tmp_path: Path) -> None:
    path = make_model("mixtral", tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    quantization = {"quant_method": "gptq", "bits": 4, "dynamic": {r"-:.*\.w2": {}}}
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    with pytest.raises(ModelError, match=r"dynamic is {.*w2': {}}; allowed: {} for Mixtral, whose matrices have other"):
        read_quantization(path)


def test_group_numbers_out_of_order_are_refused_without_desc_act(tmp_path: Path) -> None:
    path, _ = write_quantized("llama", tmp_path, "gptq-desc-act")
    with_keys(path, desc_act=False)
    with pytest.raises(ModelError, match=r"tensor \S+proj\.g_idx has other groups of columns than desc_act false"):
        model_of(path, quantization=read_quantization(path))

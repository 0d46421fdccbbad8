"""Mixtures of experts: settings and checkpoints that are refused, every layout of tensors, memory, dummy weights."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from support.engines import cpu_engine
from support.expert_models import MOE_KINDS, WEIGHTS, as_they_are, changed, quantised, single
from support.parallel_models import CPU, logits_of, model_of, tokens_of
from support.quantized_models import SCHEMES
from support.sequences import Sequences
from support.tiny_models import make_model, randomise, reference_logits, write_checkpoint
from tok_core import InvalidField, ModelError, SamplingParams
from tok_core.config import EngineConfig, RankCoordinates, all_coordinates
from tok_core.model_config import read_config
from tok_core.models import (
    CausalLM,
    ExpertLoad,
    IncomingWeights,
    build,
    check_checkpoint,
    fill_dummy_weights,
    load_checkpoint,
    model_bytes,
)
from tok_core.models.layers import Linear
from tok_core.models.weights import quantize_checkpoint
from tok_core.models.weights.checkpoint_quantization import FLOAT8
from tok_core.models.weights.dummy_weights import zipf_shares
from tok_core.models.weights.targets import stacked_targets, targets
from tok_core.parallel import ShardPlan
from tok_core.quantization import DenseMethod, QuantizationConfig, read_quantization
from tok_core.worker.runner import Runner
from tok_core.worker.startup import MemoryNeeds
from tok_core.worker.startup.dummy_steps import dummy_step
from tok_core.worker.state import WorkerState
from tok_kernels import choose

GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return models whose tensors are stacked, by their kinds."""
    directory = tmp_path_factory.mktemp("models")
    return {kind: make_model(kind, directory / kind) for kind in MOE_KINDS}


def parameters(model: CausalLM) -> dict[str, Tensor]:
    return dict(model.named_parameters())


@pytest.mark.parametrize("kind", MOE_KINDS)
def test_stacked_and_single_tensors_fill_every_shard_alike(kind: str, paths: dict[str, Path], tmp_path: Path) -> None:
    one_by_one = single(paths[kind], tmp_path / "single")
    names = load_file(one_by_one / WEIGHTS)
    first = "block_sparse_moe.experts.0.w1" if kind == "mixtral" else "mlp.experts.0.gate_proj"
    assert f"model.layers.1.{first}.weight" in names
    assert GATE_UP in load_file(paths[kind] / WEIGHTS)
    for coordinates in (*all_coordinates(1, 2), *all_coordinates(2, 1)):
        for quantization in (QuantizationConfig(), read_quantization(paths[kind], "fp8")):
            found, expected = (
                parameters(model_of(path, coordinates, quantization=quantization)) for path in (one_by_one, paths[kind])
            )
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize(
    ("kind", "keys", "message"),
    [
        ("qwen3-moe", {"num_experts_per_tok": 13}, "num_experts_per_tok is 13; allowed: at most 12"),
        ("qwen3-moe", {"num_local_experts": None}, "num_experts is missing"),
        ("qwen3-moe", {"num_experts": 9}, "num_local_experts is 12; allowed: 9, as num_experts, or nothing"),
        ("qwen3-moe", {"num_local_experts": 0}, "num_local_experts is 0; allowed: an integer of at least 1"),
        ("qwen3-moe", {"num_local_experts": 2048}, "num_local_experts is 2048; allowed: at most 1024"),
        ("qwen3-moe", {"norm_topk_prob": 1}, "norm_topk_prob is 1; allowed: true or false"),
        (
            "qwen3-moe",
            {"mlp_only_layers": [2]},
            r"mlp_only_layers is \[2\]; allowed: a list of layers, each from 0 to 1",
        ),
        ("qwen3-moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0; allowed: an integer of at least 1"),
        ("qwen3-moe", {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; allowed: \"softmax\""),
        ("qwen3-moe", {"router_bias": True}, "not known here: router_bias"),
        ("qwen3-moe", {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size is 8; allowed: 0"),
        ("qwen3-moe", {"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window is True; allowed: false"),
        ("qwen2-moe", {"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ("qwen2-moe", {"routed_scaling_factor": 2.5}, "routed_scaling_factor is 2.5; allowed: 1.0"),
        ("mixtral", {"num_local_experts": None}, "num_local_experts is missing"),
    ],
)
def test_settings_that_are_not_computed_are_refused_by_name(
    kind: str, keys: dict[str, object], message: str, paths: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        read_config(changed(paths[kind], tmp_path / "changed", as_they_are, **keys))


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("dense", [[], [0], [0, 2]])
def test_layers_without_experts_have_an_mlp(step: int, dense: list[int], tmp_path: Path) -> None:
    path = make_model("qwen3-moe", tmp_path / "qwen3-moe", layers=3)
    config = json.loads((path / "config.json").read_text())
    config |= {"decoder_sparse_step": step, "mlp_only_layers": dense}
    (path / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_config(type(AutoModelForCausalLM.from_pretrained(path).config)(**config))
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(path)
    moe = read_config(path).moe
    assert moe is not None
    assert moe.layers == {layer for layer in range(3) if (layer + 1) % step == 0 and layer not in dense}
    tokens = list(range(20))
    found = Sequences(model_of(path), 1, 16).feed([(0, tokens)], range(20))
    expected = reference_logits(path, tokens)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.std()))
    for coordinates in all_coordinates(3, 1):
        model_of(path, coordinates)  # stages skip the other stages' layers, of whatever kind


def test_experts_are_described_in_one_line(paths: dict[str, Path]) -> None:
    described = [str(read_config(path).moe) for path in paths.values()]
    assert described == [
        "4 of 128 columns, 2 a token; layers with experts: 2",
        "6 of 48 columns, 3 a token, one of 80 for all tokens; layers with experts: 1",
        "12 of 32 columns, 4 a token; layers with experts: 2",
    ]


def test_number_of_ranks_divides_the_experts_intermediate_size(tmp_path: Path) -> None:
    path = make_model("qwen2-moe", tmp_path / "moe")
    config = json.loads((path / "config.json").read_text())
    for key, name in (("moe_intermediate_size", "experts'"), ("shared_expert_intermediate_size", "shared expert's")):
        (path / "config.json").write_text(json.dumps(config | {key: 49}))
        with pytest.raises(InvalidField, match=f"tp is 2; allowed: divisors of 49, the model's {name} intermediate"):
            ShardPlan.of(read_config(path), RankCoordinates(ranks=2))


def test_checkpoints_that_lack_experts_are_refused_before_weights_are_read(
    paths: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_by_one = single(paths["qwen3-moe"], tmp_path / "single")
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    lacking = changed(one_by_one, tmp_path / "lacking", lambda tensors: tensors.pop(name))
    fewer = changed(
        paths["qwen3-moe"], tmp_path / "fewer", lambda tensors: tensors.update({GATE_UP: tensors[GATE_UP][:9]})
    )
    both = changed(
        one_by_one,
        tmp_path / "both",
        lambda tensors: tensors.update({GATE_UP: load_file(paths["qwen3-moe"] / WEIGHTS)[GATE_UP]}),
    )
    model = build(read_config(lacking), choose(CPU), CPU, torch.float32)
    for act in (load_checkpoint, check_checkpoint):
        with pytest.raises(ModelError, match=rf"lacking: missing tensors: {name} \[32, 64\]$"):
            act(model, lacking)
        with pytest.raises(ModelError, match=rf"tensor {GATE_UP} has shape \[9, 64, 64\]; expected \[12, 64, 64\]"):
            act(model, fewer)
        with pytest.raises(ModelError, match=r"tensor model\.layers\.1\.mlp\.experts\.0\..*\[32, 64\] has no place"):
            act(model, both)


def test_tensors_of_a_trainer_update_stacked_experts(paths: dict[str, Path], tmp_path: Path) -> None:
    path = paths["qwen3-moe"]
    other = make_model("qwen3-moe", tmp_path / "other", seed=7)
    expected = logits_of(model_of(other))
    for source in (other, single(other, tmp_path / "single")):
        model, tensors = model_of(path), load_file(source / WEIGHTS)
        incoming = IncomingWeights(model)
        shapes = [list(tensor.shape) for tensor in tensors.values()]
        incoming.check_metadata(list(tensors), ["float32"] * len(tensors), shapes)
        for name, tensor in tensors.items():
            incoming.stage(name, tensor, copy=True)
        incoming.check(complete=True)
        incoming.apply()
        assert all(
            torch.equal(torch.from_numpy(a), torch.from_numpy(b))
            for a, b in zip(logits_of(model), expected, strict=True)
        )
    partial = IncomingWeights(model_of(path))
    stacked = load_file(other / WEIGHTS)
    partial.stage(GATE_UP, stacked[GATE_UP], copy=True)
    partial.check(complete=False)
    with pytest.raises(ModelError, match="missing tensors"):
        partial.check(complete=True)
    partial.stage("model.layers.1.mlp.experts.0.up_proj.weight", stacked[GATE_UP][0, 32:], copy=True)
    with pytest.raises(ModelError, match=r"experts\.0\.up_proj\.weight comes twice"):
        partial.check(complete=False)


@pytest.mark.parametrize("kind", MOE_KINDS)
def test_memory_counts_all_experts(kind: str, paths: dict[str, Path]) -> None:
    config = read_config(paths[kind])
    stored = sum(tensor.nbytes for tensor in load_file(paths[kind] / WEIGHTS).values())
    table = config.max_positions * config.head_dim * 4
    assert model_bytes(config, torch.float32, RankCoordinates(), QuantizationConfig()) == stored + table
    engine = EngineConfig(model=str(paths[kind]))
    halves = [MemoryNeeds.of(engine, config, torch.float32, one).weights - table for one in all_coordinates(1, 2)]
    assert halves[0] == halves[1]
    assert stored / 2 < halves[0] < stored / 2 * 1.15  # norms and routers are whole on both ranks


def dummy_model(path: Path, coordinates: RankCoordinates = RankCoordinates(), **options: Any) -> CausalLM:
    model = build(read_config(path), choose(CPU), CPU, torch.float32, coordinates)
    fill_dummy_weights(model, 3, **options)
    return model


def chosen_experts(model: CausalLM, tokens: list[int]) -> Tensor:
    """Return how many tokens of a prompt each expert of each layer computes."""
    load = ExpertLoad(model)
    with load.counting():
        Sequences(model, 1, 64, max_len=1024).feed([(0, tokens)], [0])
    counted = load.take()
    assert counted is not None
    return counted


def test_statistics_show_how_unevenly_experts_are_used(paths: dict[str, Path]) -> None:
    path, prompt = paths["qwen3-moe"], tokens_of(33)
    counted = chosen_experts(model_of(path), prompt)
    with cpu_engine(path) as engine:
        assert engine.stats()["expert_mean_tokens"] == 0
        engine.generate([prompt], SamplingParams(max_tokens=2, ignore_eos=True))
        stats = engine.stats()
        assert stats["expert_mean_tokens"] == pytest.approx(2 * 33 * 4 / 12)
        assert stats["expert_max_tokens"] == counted.max(1).values.sum()
        assert stats["expert_rank_max_tokens"] == stats["expert_mean_tokens"]
        engine.generate([prompt[:3]], SamplingParams(max_tokens=100, ignore_eos=True))  # one of whose steps is counted
        assert engine.stats()["expert_mean_tokens"] == pytest.approx(2 * 34 * 4 / 12)
        assert engine.stats()["expert_max_tokens"] == counted.max(1).values.sum() + 2


@pytest.fixture
def runner(paths: dict[str, Path]) -> Runner:
    model = model_of(paths["qwen3-moe"])
    state = WorkerState(model.config, CPU, torch.float32, slots=8, num_pages=1, page_size=16, pages_per_slot=1)
    return Runner(model, choose(CPU), state)


def test_padding_rows_of_graphs_choose_no_expert(runner: Runner) -> None:
    load = ExpertLoad(runner.model)
    with load.counting():
        runner.graphs.launch_eagerly([8])  # without a step, all rows are padding
    counted = load.take()
    assert counted is not None
    assert not counted.any()


def test_rows_of_ended_samples_choose_no_expert(runner: Runner) -> None:
    step, load = dummy_step(decode=5), ExpertLoad(runner.model)
    runner.launch(step)
    runner.state.columns.ended[1:3] = 1
    with load.counting():
        runner.launch(structs.replace(step, new=None, max_kv=2))
    counted = load.take()
    assert counted is not None
    assert counted.sum(1).tolist() == [3 * 4, 3 * 4]


def random_tokens(vocabulary: int) -> list[int]:
    tokens: list[int] = torch.randint(0, vocabulary, (1000,), generator=torch.Generator().manual_seed(1)).tolist()
    return tokens


def test_dummy_weights_route_evenly_and_do_not_depend_on_shards(tmp_path: Path) -> None:
    path = make_model("qwen3-moe", tmp_path / "moe", hidden_size=128)
    whole = dummy_model(path, eos_probability=0.01)
    counted = chosen_experts(whole, random_tokens(512))
    assert counted.sum(1).tolist() == [4000, 4000]
    # 512 distinct tokens: an expert has 333 of them in the mean, with a standard deviation of about 21.
    assert counted.min() > 220
    assert counted.max() < 450
    both: list[dict[str, Any]] = [{"eos_probability": 0.01}, {"moe_skew": 1.0}]
    for options in both:
        whole = dummy_model(path, **options)
        for coordinates in all_coordinates(1, 2):
            for name, target in targets(dummy_model(path, coordinates, **options)).items():
                assert torch.equal(target.view, target.part_of(targets(whole)[name].view)), name


@pytest.mark.parametrize(("options", "layers"), [({}, 2), ({"eos_probability": 0.1}, 1)])
@pytest.mark.parametrize("skew", [0.6, 1.5])
def test_dummy_weights_route_by_a_zipf_law(skew: float, options: dict[str, Any], layers: int, tmp_path: Path) -> None:
    path = make_model("qwen3-moe", tmp_path / "moe", hidden_size=256, vocab_size=4096, layers=layers)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_experts": 32, "num_local_experts": 32}))
    counted = chosen_experts(dummy_model(path, moe_skew=skew, **options), random_tokens(4000))
    expected = 1000 * zipf_shares(32, 4, skew)
    assert math.isclose(expected.sum(), 4000)
    assert expected[0] > 2 * expected[8]
    # Logits are sums over 256 coordinates, so that an expert's offset counts for about 6 % more or less.
    spread = 4 * expected.sqrt() + 0.2 * expected
    for layer in counted:
        assert ((layer.sort(descending=True).values - expected).abs() < spread).all()
    favourites = [layer.argmax().item() for layer in counted]
    assert len(set(favourites)) == layers  # not the same in all layers


def test_a_skew_needs_experts(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match=r"moe_skew is 1\.0; allowed: 0 for a model without experts"):
        dummy_model(make_model("qwen3", tmp_path), moe_skew=1.0)


@pytest.mark.parametrize("kind", MOE_KINDS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantised_experts_have_the_logits_of_their_dequantised_weights(
    scheme: str, kind: str, paths: dict[str, Path], tmp_path: Path
) -> None:
    path, equal = quantised(single(paths[kind], tmp_path / "single"), scheme, tmp_path / "quantised")
    quantization = read_quantization(path)
    assert quantization.method_of(["model.layers.1.mlp.experts.3.up_proj"]) == quantization.method != DenseMethod()
    found, expected = logits_of(model_of(path, quantization=quantization)), logits_of(model_of(equal))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max(initial=1))


def wide_moe(kind: str, directory: Path) -> Path:
    """Write a mixture of experts whose matrices have multiples of 128 rows and columns."""
    path = make_model(kind, directory, hidden_size=128, head_dim=64)
    if kind == "mixtral":
        return path
    config = json.loads((path / "config.json").read_text())
    config |= {key: 128 for key in config if key.endswith("expert_intermediate_size") or key == "moe_intermediate_size"}
    model = AutoModelForCausalLM.from_config(type(AutoModelForCausalLM.from_pretrained(path).config)(**config))
    randomise(model, 3)
    write_checkpoint(model, path)
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("kind", MOE_KINDS)
@pytest.mark.parametrize("scheme", ["fp8-dynamic", "fp8-block", "int4-g128"])
def test_experts_are_written_rounded_by_the_names_of_real_checkpoints(scheme: str, kind: str, tmp_path: Path) -> None:
    stacked = wide_moe(kind, tmp_path / "stacked")
    found = []
    for path in (stacked, single(stacked, tmp_path / "single")):
        out = tmp_path / f"{path.name}-rounded"
        written = list(quantize_checkpoint(path, out, scheme))
        assert {one.source for one in written} == set(load_file(path / WEIGHTS))
        tensors, config = load_file(out / WEIGHTS), json.loads((out / "config.json").read_text())
        found.append((tensors, config["quantization_config"]))
        names = {one.name for one in written if one.error is not None}
        end = "weight_packed" if scheme.startswith("int4") else "weight"
        assert all(tensors[f"{name.removesuffix('weight')}{end}"].dtype in (FLOAT8, torch.int32) for name in names)
        experts = "block_sparse_moe.experts.3.w2" if kind == "mixtral" else "mlp.experts.3.down_proj"
        assert f"model.layers.1.{experts}.weight" in names
        routers = {name for name in tensors if re.search(r"gate\.weight$", name)}
        assert routers
        assert not routers & names
        assert all(one.error is None or 0 < one.error < 0.15 for one in written)
        quantization = read_quantization(out)
        model, dense = model_of(out, quantization=quantization), model_of(path)
        linears = {name: one for name, one in dense.named_modules() if isinstance(one, Linear)}
        for name, linear in linears.items():
            other = model.get_submodule(name)
            assert isinstance(other, Linear)
            exact, rounded = (one.method.dense_weight(one) for one in (linear, other))
            error = (rounded - exact).norm() / exact.norm()
            assert error == 0 if name.endswith(("gate", "lm_head")) else 0.01 < error < 0.15
    assert found[0][0].keys() == found[1][0].keys()
    assert all(torch.equal(tensor, found[1][0][name]) for name, tensor in found[0][0].items())
    assert found[0][1] == found[1][1]


def test_stacked_tensors_of_quantised_checkpoints_have_no_place(paths: dict[str, Path]) -> None:
    quantization = {"quant_method": "fp8", "weight_block_size": [16, 16], "modules_to_not_convert": ["gate"]}
    path = paths["qwen3-moe"]
    out = changed(path, path.parent / "quantised", quantization_config=quantization)
    model = build(read_config(out), choose(CPU), CPU, torch.float32, quantization=read_quantization(out))
    assert stacked_targets(model) == {}
    with pytest.raises(ModelError, match=r"tensor model\.layers\.\d\.mlp\.experts\..* has no place in the model"):
        load_checkpoint(model, out)

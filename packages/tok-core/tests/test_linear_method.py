"""A model may have linear layers of several weight formats, chosen by their names; each format is one LinearMethod."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from support.int8_rows import INT8, write_models
from support.parallel_models import CPU, PROMPT, chained_logits, compute, greedy, logits_of, model_of, tokens_of
from support.ranks import run_ranks
from support.sequences import Sequences
from support.tiny_models import change_weights, make_model
from tok_core import ModelError
from tok_core.config import RankCoordinates, all_coordinates
from tok_core.model_config import read_config
from tok_core.models import CausalLM, Linear, build, fill_dummy_weights
from tok_core.models.decoder import DecoderLayer
from tok_core.models.weights.targets import targets
from tok_core.quantization import DenseMethod, QuantizationConfig
from tok_core.worker.startup.warmup import warm_up_gemms
from tok_kernels import choose

MIXED = QuantizationConfig(INT8, ("lm_head", "layers.1", r"re:.*\.2\.mlp\.down"))
DENSE_IN_MIXED = ("lm_head", "layers.1.", "layers.2.mlp.down")
CASES = [
    (QuantizationConfig(INT8), ()),
    (QuantizationConfig(INT8, ("lm_head",)), ("lm_head",)),
    (MIXED, DENSE_IN_MIXED),
]


def linears(model: CausalLM) -> dict[str, Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Linear)}


@pytest.mark.parametrize(("quantization", "dense"), CASES)
@pytest.mark.parametrize("kind", ["llama-untied", "qwen2", "qwen3"])
def test_int8_layers_beside_ignored_ones_equal_the_dequantised_model(
    kind: str, quantization: QuantizationConfig, dense: tuple[str, ...], tmp_path: Path
) -> None:
    path, dequantised = write_models(kind, tmp_path, dense)
    model = model_of(path, quantization=quantization)
    dtypes = {name: linear.weight.dtype for name, linear in linears(model).items()}
    assert {name for name, dtype in dtypes.items() if dtype != torch.int8} == {
        name for name in dtypes if any(part in name for part in dense)
    }
    found, expected = logits_of(model), logits_of(model_of(dequantised))
    assert all(map(np.array_equal, found, expected))
    exact = logits_of(model_of(make_model(kind, tmp_path / "exact", layers=3)))
    assert not any(map(np.array_equal, found[:-1], exact[:-1]))  # the last step has no logits


def test_ranks_and_stages_compute_int8_layers_beside_dense_ones(tmp_path: Path) -> None:
    path, dequantised = write_models("llama-untied", tmp_path, DENSE_IN_MIXED)
    alone = model_of(dequantised)
    expected, in_chunks, tokens = logits_of(alone), chained_logits([alone]), greedy(alone, tokens_of(PROMPT), 6)
    for [of_rank] in run_ranks(all_coordinates(1, 2), compute, [path], (0, 1000), 6, MIXED):
        logits, chained, chosen, _ = of_rank
        assert chosen == tokens
        for found, reference in [*((one, expected) for one in logits), *((one, in_chunks) for one in chained)]:
            for a, b in zip(found, reference, strict=True):
                assert np.abs(a - b).max(initial=0) <= 5e-5 * np.abs(b).max(initial=0)


def share_of(path: Path, coordinates: RankCoordinates, dummies: bool) -> CausalLM:
    if not dummies:
        return model_of(path, coordinates, quantization=MIXED)
    model = build(
        read_config(path), choose(CPU), CPU, torch.float32, coordinates, quantization=QuantizationConfig(INT8)
    )
    fill_dummy_weights(model, 7, eos_probability=0.1)
    return model


@pytest.mark.parametrize("dummies", [False, True])
@pytest.mark.parametrize(("stages", "ranks"), [(1, 2), (3, 1)])
def test_shards_of_int8_weights_and_scales_are_slices_of_the_whole(
    stages: int, ranks: int, dummies: bool, tmp_path: Path
) -> None:
    path, _ = write_models("llama-untied", tmp_path, DENSE_IN_MIXED)
    whole, held = targets(share_of(path, RankCoordinates(), dummies)), set()
    for coordinates in all_coordinates(stages, ranks):
        for name, target in targets(share_of(path, coordinates, dummies)).items():
            assert torch.equal(target.view, target.part_of(whole[name].view)), name
            held.add(name)
    assert held == set(whole)


def test_eos_probability_holds_for_dummy_weights_with_an_int8_lm_head(tmp_path: Path) -> None:
    path = make_model("llama-untied", tmp_path)
    config, p, shares = read_config(path), 1 / 16, []
    for quantization in (QuantizationConfig(), QuantizationConfig(INT8)):
        model = build(config, choose(CPU), CPU, torch.float32, quantization=quantization)
        fill_dummy_weights(model, 3, eos_probability=p, eos_temperature=0.7)
        probabilities = (Sequences(model, 1, 64).feed([(0, tokens_of(40))]) / 0.7).softmax(-1)
        shares.append(probabilities[:, list(config.eos_token_ids)].sum(-1))
    dense, int8 = shares
    assert float(dense.mean()) == pytest.approx(p, rel=0.05)
    torch.testing.assert_close(int8, dense, rtol=0.005, atol=0)


def test_stacked_layer_with_some_matrices_ignored_is_refused() -> None:
    quantization = QuantizationConfig(INT8, ("k_proj", "model.layers.0.mlp"))
    names = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    with pytest.raises(ModelError) as refused:
        quantization.method_of(names)
    assert str(refused.value) == (
        f"quantization_config gives {names[1]} another weight format than {names[0]}, {names[2]}; allowed: one format, "
        "since they are computed as one layer"
    )
    both = [f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up")]
    assert isinstance(quantization.method_of(both), DenseMethod)
    assert quantization.method_of([name.replace("0", "10") for name in both]) is INT8


@pytest.mark.parametrize(
    ("entry", "ignored"),
    [
        ("lm_head", ["lm_head"]),
        ("mlp.gate", ["model.layers.1.mlp.gate", "model.layers.11.mlp.gate"]),
        ("model.layers.1", ["model.layers.1.mlp.gate", "model.layers.1.mlp.gate_proj"]),
        ("re:model.*gate", ["model.layers.1.mlp.gate", "model.layers.1.mlp.gate_proj", "model.layers.11.mlp.gate"]),
        ("re:gate", []),
    ],
)
def test_ignored_entry_matches_whole_name_components_or_is_a_regex(entry: str, ignored: list[str]) -> None:
    names = ["lm_head", "model.layers.1.mlp.gate", "model.layers.1.mlp.gate_proj", "model.layers.11.mlp.gate"]
    quantization = QuantizationConfig(INT8, (entry,))
    assert [name for name in names if quantization.method_of([name]) is not INT8] == ignored


def test_checkpoint_of_another_format_is_refused_by_every_stage(tmp_path: Path) -> None:
    int8, dense = write_models("llama-untied", tmp_path)
    for coordinates in all_coordinates(2, 1):
        with pytest.raises(ModelError, match=r"tensor \S+\.weight_scale \[\d+, 1\] has no place in the model"):
            model_of(int8, coordinates)
        with pytest.raises(ModelError, match=r"tensor \S+\.weight is stored as F32; supported: I8"):
            model_of(dense, coordinates, quantization=QuantizationConfig(INT8))


def test_int8_projection_beyond_float16_takes_bfloat16_activations(tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.q_proj.weight_scale"

    def enlarge(weights: dict[str, Tensor]) -> None:
        weights[name] *= 1e5

    path = change_weights(write_models("llama", tmp_path)[0], enlarge)
    model = model_of(path, dtype=torch.bfloat16, quantization=QuantizationConfig(INT8))
    projections = [linear for name, linear in linears(model).items() if name.endswith("qkv_proj")]
    assert [linear.dtype for linear in projections] == [torch.float16, torch.bfloat16, torch.float16]
    assert {linear.weight.dtype for linear in projections} == {torch.int8}
    assert Sequences(model, 1, 64).feed([(0, tokens_of(40))]).isfinite().all()


def test_gemms_of_each_combination_of_formats_are_warmed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = write_models("llama-untied", tmp_path, DENSE_IN_MIXED)
    (stage, _) = (model_of(path, coordinates, quantization=MIXED) for coordinates in all_coordinates(2, 1))
    layers = list(stage.model.layers.values())
    ran: list[DecoderLayer] = []
    run = DecoderLayer.run_gemms

    def counted(layer: DecoderLayer, *args: object) -> Tensor:
        ran.append(layer)
        return run(layer, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(DecoderLayer, "run_gemms", counted)
    warm_up_gemms(stage, 1, 1)
    assert ran == layers
    assert len(layers) == 2

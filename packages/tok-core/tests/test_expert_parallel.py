"""Expert parallelism: ranks with some experts each give the answers of one process, and read only their tensors."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from support.engines import random_prompts
from support.expert_models import MOE_KINDS, WEIGHTS, changed, quantised, single
from support.parallel_models import CPU, greedy, greedy_of_shards, model_of, tokens_of
from support.quantized_models import ROUNDED, SCHEMES
from support.ranks import run_ranks
from support.serving import free_port
from support.tiny_models import make_model, reference_greedy
from support.trainer import read_line, send_line, trainer, update_info, weights
from tok_core import Engine, EngineConfig, InvalidField, ModelError, SamplingParams
from tok_core.config import RankCoordinates, all_coordinates
from tok_core.model_config import read_config
from tok_core.models import CausalLM, IncomingWeights, build, fill_dummy_weights, load_checkpoint
from tok_core.models.weights.targets import targets
from tok_core.parallel import ShardPlan
from tok_core.quantization import read_quantization
from tok_kernels import choose

pytestmark = pytest.mark.usefixtures("forked_children")

# Stages and replicas, and the other kinds, are those of `test_redundant_experts.py`, whose engines do the same.
ENGINES = {"mixtral": {"tp": 2}}
PROMPTS = random_prompts((1, 17, 33, 65))
NEW = 16
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=0)
RANKS = tuple(all_coordinates(1, 2, ep=True))
EXPERT = "model.layers.1.mlp.experts.{}.up_proj.weight"


def assert_transformers_answers(engine: Engine, path: Path) -> None:
    outputs = engine.generate(PROMPTS, GREEDY)
    for output, (tokens, logprobs) in zip(outputs, reference_greedy(path, PROMPTS, NEW), strict=True):
        assert output.outputs[0].token_ids == tokens
        found = [one.logprob for one in output.outputs[0].logprobs or []]
        np.testing.assert_allclose(found, logprobs, rtol=0, atol=1e-3)


@pytest.mark.parametrize("kind", ENGINES)
def test_engines_equal_transformers_also_after_a_sleep_and_updates(kind: str, tmp_path: Path) -> None:
    old, new = (make_model(kind, tmp_path / f"{seed}", seed=seed) for seed in range(2))
    settings: dict[str, Any] = {"kv_cache_tokens": 4096, "max_running": 16, "dtype": "float32", "device": "cpu"}
    settings |= ENGINES[kind]
    with Engine(EngineConfig(model=str(old), ep=True, enable_sleep_mode=True, **settings)) as engine:
        assert_transformers_answers(engine, old)
        engine.sleep(1)
        engine.wake_up()
        assert_transformers_answers(engine, old)
        engine.update_weights(str(new))
        assert_transformers_answers(engine, new)
        port, members = free_port(), 1 + math.prod(ENGINES[kind].values())
        update: dict[str, Any] = update_info(weights(old))
        with trainer(port, members, old) as process:
            engine.weight_transfer.join("127.0.0.1", port, rank_offset=1, world_size=members)
            assert read_line(process) == "joined"
            send_line(process)
            engine.weight_transfer.receive(update["names"], update["dtype_names"], update["shapes"])
            assert_transformers_answers(engine, old)
        stats = engine.stats()
        assert 0 < stats["expert_mean_tokens"] < stats["expert_rank_max_tokens"] < stats["expert_max_tokens"]


def test_quantised_experts_of_ranks_equal_their_dequantised_weights(tmp_path: Path) -> None:
    path, prompt = make_model("qwen3-moe", tmp_path / "model"), tokens_of(37)
    one_by_one = single(path, tmp_path / "single")
    schemes = list(SCHEMES)
    models, expected = [], []
    for number, scheme in enumerate(schemes):
        written, equal = quantised(one_by_one, scheme, tmp_path / f"{number}")
        models.append((written, read_quantization(written)))
        expected.append(greedy(model_of(equal), prompt, 6))
    for word in ROUNDED.values():
        models.append((path, read_quantization(path, word)))
        expected.append(greedy(model_of(path, quantization=models[-1][1]), prompt, 6))
    for of_rank in run_ranks(RANKS, greedy_of_shards, models, prompt, 6):
        for name, found, tokens in zip([*schemes, *ROUNDED], of_rank, expected, strict=True):
            assert found == (tokens, tokens), name


@pytest.mark.parametrize("kind", MOE_KINDS)
def test_ranks_hold_the_experts_of_the_whole_model_once(kind: str, tmp_path: Path) -> None:
    path = make_model(kind, tmp_path / "stacked")
    one_by_one, config = single(path, tmp_path / "single"), read_config(path)
    assert config.moe is not None
    for fill in ("stacked", "single", "dummy"):

        def filled(coordinates: RankCoordinates, fill: str = fill) -> dict[str, Tensor]:
            model = build(config, choose(CPU), CPU, torch.float32, coordinates)
            if fill == "dummy":
                fill_dummy_weights(model, 5)
            else:
                load_checkpoint(model, path if fill == "stacked" else one_by_one)
            return {name: target.part_of(target.view) for name, target in whole_targets(model).items()}

        whole = filled(RankCoordinates())
        parts = [filled(coordinates) for coordinates in all_coordinates(2, 2, ep=True)]
        experts = [name for name in whole if ".experts." in name]
        assert sorted(name for part in parts for name in part if ".experts." in name) == sorted(experts)
        for part in parts:
            for name in part:
                if ".experts." in name:
                    assert torch.equal(part[name], whole[name]), name


def whole_targets(model: CausalLM) -> dict[str, Any]:
    """Return the targets that hold whole tensors."""
    return {name: target for name, target in targets(model).items() if target.is_whole}


def test_each_rank_refuses_unknown_tensors_and_misses_only_its_own(tmp_path: Path) -> None:
    path = single(make_model("qwen3-moe", tmp_path / "stacked"), tmp_path / "single")
    models = [build(read_config(path), choose(CPU), CPU, torch.float32, coordinates) for coordinates in RANKS]
    for name in (EXPERT.format(12), EXPERT.format(9).replace("up_proj", "side_proj")):
        wrong = changed(path, tmp_path / name, partial(dict.update, **{name: torch.ones(3)}))
        for model in models:
            with pytest.raises(ModelError, match=rf"tensor {name} \[3\] has no place in the model"):
                load_checkpoint(model, wrong)
    lacking = changed(path, tmp_path / "lacking", lambda tensors: tensors.pop(EXPERT.format(9)))
    load_checkpoint(models[0], lacking)
    with pytest.raises(ModelError, match=rf"lacking: missing tensors: {EXPERT.format(9)} \[32, 64\]$"):
        load_checkpoint(models[1], lacking)


@pytest.mark.parametrize("layout", ["stacked", "single"])
def test_a_trainers_tensors_reach_the_rank_that_holds_the_expert(layout: str, tmp_path: Path) -> None:
    old, new = (make_model("qwen3-moe", tmp_path / f"{seed}", seed=seed) for seed in range(2))
    tensors = load_file((new if layout == "stacked" else single(new, tmp_path / "single")) / WEIGHTS)
    for coordinates in RANKS:
        model = model_of(old, coordinates)
        incoming = IncomingWeights(model)
        incoming.check_metadata(
            list(tensors), ["float32"] * len(tensors), [list(one.shape) for one in tensors.values()]
        )
        for name, tensor in tensors.items():
            incoming.stage(name, tensor, copy=True)
        incoming.check(complete=True)
        incoming.apply()
        expected = dict(model_of(new, coordinates).named_parameters())
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, expected[name]), name


@pytest.mark.parametrize(
    ("kind", "ranks", "message"),
    [
        ("qwen2-moe", 4, r"tp is 4; allowed: divisors of 6, the model's experts \(with ep\)"),
        ("qwen3", 2, "ep is True; allowed: false for a model without experts"),
    ],
)
def test_experts_that_ranks_cannot_divide_are_refused_early(
    kind: str, ranks: int, message: str, tmp_path: Path
) -> None:
    config = read_config(make_model(kind, tmp_path))
    with pytest.raises(InvalidField, match=message):
        ShardPlan.of(config, RankCoordinates(ranks=ranks, ep=True))


def test_workers_name_a_flag_that_they_refuse(tmp_path: Path) -> None:
    config = EngineConfig(model=str(make_model("qwen3", tmp_path)), device="cpu", tp=2, ep=True)
    with pytest.raises(InvalidField, match="ep is True; allowed: false for a model without experts"):
        Engine(config)


def test_experts_of_any_size_can_be_divided_among_ranks(tmp_path: Path) -> None:
    path = make_model("qwen2-moe", tmp_path / "model")
    config = read_config(changed(path, tmp_path / "odd", moe_intermediate_size=49))
    plan = ShardPlan.of(config, RankCoordinates(rank=1, ranks=2, ep=True))
    assert (plan.expert_slots.start, plan.expert_slots.stop, plan.expert_columns.count) == (3, 6, 49)
    with pytest.raises(InvalidField, match="divisors of 49"):
        ShardPlan.of(config, RankCoordinates(rank=1, ranks=2))

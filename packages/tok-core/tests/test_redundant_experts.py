"""Redundant experts: copies on several ranks share an expert's tokens, give the same answers, and follow the load."""

from __future__ import annotations

import logging
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from support.engines import random_prompts
from support.expert_models import MOE_KINDS, WEIGHTS, quantised, single
from support.moved_experts import moved_greedy
from support.parallel_models import CPU, greedy, model_of, tokens_of
from support.patience import wait_until
from support.quantized_models import ROUNDED, SCHEMES
from support.ranks import run_ranks
from support.serving import free_port
from support.tiny_models import change_weights, make_model, reference_greedy
from support.trainer import announce, read_line, send_line, trainer, update_info, weights
from tok_core import Engine, EngineConfig, InvalidField, ModelError, SamplingParams
from tok_core.config import RankCoordinates, all_coordinates
from tok_core.model_config import read_config
from tok_core.models import CausalLM, IncomingWeights, build, fill_dummy_weights
from tok_core.models.weights.targets import targets
from tok_core.parallel import ExpertPlacement, ShardPlan
from tok_core.quantization import QuantizationConfig, read_quantization
from tok_kernels import choose

pytestmark = pytest.mark.usefixtures("forked_children")

COPIES = {"mixtral": 2, "qwen2-moe": 2, "qwen3-moe": 4}
# A single stage and replica, and Mixtral, are those of `test_expert_parallel.py`.
ENGINES: dict[str, dict[str, Any]] = {
    "qwen2-moe": {"tp": 2, "pp": 2},
    "qwen3-moe": {"tp": 2, "dp": 2},
}
PROMPTS = random_prompts((1, 17, 33, 65))
NEW = 16
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)


def assert_transformers_answers(engine: Engine, path: Path) -> None:
    found = [output.outputs[0].token_ids for output in engine.generate(PROMPTS, GREEDY)]
    assert found == [tokens for tokens, _ in reference_greedy(path, PROMPTS, NEW)]


@pytest.mark.parametrize("kind", ENGINES)
def test_engines_that_move_experts_give_tokens_of_transformers(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tok_core")
    old, new = (make_model(kind, tmp_path / f"{seed}", seed=seed) for seed in range(2))
    settings: dict[str, Any] = {"kv_cache_tokens": 4096, "max_running": 16, "dtype": "float32", "device": "cpu"}
    settings |= {"ep": True, "redundant_experts": COPIES[kind], "expert_rebalance_steps": 8, **ENGINES[kind]}
    with Engine(EngineConfig(model=str(old), enable_sleep_mode=True, **settings)) as engine:
        engine.generate(random_prompts((200,)), GREEDY)  # whose tokens are counted
        assert_transformers_answers(engine, old)
        assert "experts moved: " in capfd.readouterr().err
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
        assert 0 < stats["expert_mean_tokens"] < stats["expert_rank_max_tokens"]


def test_experts_stay_while_a_rank_that_refused_a_tensor_stages_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests run, and experts are due to move, before the engine drops the tensors that the other rank has staged."""

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.mlp.experts.gate_up_proj"][5, 0, 0] = math.nan  # an expert of rank 1 only

    path, bad = (make_model("qwen3-moe", tmp_path / name) for name in ("good", "bad"))
    change_weights(bad, spoil)
    settings: dict[str, Any] = {"kv_cache_tokens": 4096, "max_running": 16, "dtype": "float32", "device": "cpu"}
    settings |= {"tp": 2, "ep": True, "redundant_experts": 2, "expert_rebalance_steps": 8, "quantization": "fp8"}
    with Engine(EngineConfig(model=str(path), **settings)) as engine:
        transfer, port = engine.weight_transfer, free_port()
        fail = transfer._fail

        def generate_and_fail() -> None:
            engine.generate(random_prompts((5,)), GREEDY)
            fail()

        monkeypatch.setattr(transfer, "_fail", generate_and_fail)
        with trainer(port, 3, bad) as process:
            transfer.join("127.0.0.1", port, rank_offset=1, world_size=3)
            transfer.start()
            send_line(process)
            with pytest.raises(ModelError, match="gate_up_proj has NaN"):
                transfer.receive(**announce(bad))
        assert engine.stats()["restarts"] == 0


def test_statistics_add_up_the_tokens_of_the_copies_of_an_expert(tmp_path: Path) -> None:
    path, prompt = make_model("qwen3-moe", tmp_path / "model"), random_prompts((200,))
    settings: dict[str, Any] = {"kv_cache_tokens": 4096, "dtype": "float32", "device": "cpu", "tp": 2, "ep": True}
    found = []
    for copies in (0, 12):  # or one of each expert
        with Engine(EngineConfig(model=str(path), redundant_experts=copies, **settings)) as engine:
            engine.generate(prompt, SamplingParams(temperature=0, max_tokens=1))  # whose only step counts tokens
            found.append(counted_tokens(engine))
    assert found[0] == found[1]


def counted_tokens(engine: Engine) -> tuple[float, float]:
    """Return the tokens of a mean expert and of the busiest one, once they are reported."""
    wait_until(lambda: engine.stats()["expert_mean_tokens"] > 0)
    stats = engine.stats()
    return stats["expert_mean_tokens"], stats["expert_max_tokens"]


def test_moved_experts_of_every_format_keep_the_tokens_and_even_out_ranks(tmp_path: Path) -> None:
    path, prompt = make_model("qwen3-moe", tmp_path / "model"), tokens_of(150)
    one_by_one = single(path, tmp_path / "single")
    names = list(SCHEMES)
    models = [(path, QuantizationConfig())]
    for number, scheme in enumerate(names):
        written = quantised(one_by_one, scheme, tmp_path / f"{number}")[0]
        models.append((written, read_quantization(written)))
    models += [(path, read_quantization(path, word)) for word in ROUNDED.values()]
    expected = [greedy(model_of(model, quantization=one), prompt, 4) for model, one in models]
    ranks = tuple(all_coordinates(1, 2, ep=True, redundant_experts=4))
    both = run_ranks(ranks, moved_greedy, models, prompt, 4)
    for of_rank in both:
        for (before, after, first, last, moved), tokens in zip(of_rank, expected, strict=True):
            assert before == after == tokens
            assert last < first if moved else last == first
        assert any(moved for *_, moved in of_rank)


@pytest.mark.parametrize("kind", MOE_KINDS)
def test_copies_hold_the_weights_of_their_experts(kind: str, tmp_path: Path) -> None:
    path = make_model(kind, tmp_path / "stacked")
    one_by_one = single(path, tmp_path / "single")
    config = read_config(path)
    assert config.moe is not None
    tensors = load_file(one_by_one / WEIGHTS)
    for fill in ("stacked", "single", "trainer", "dummy"):

        def filled(coordinates: RankCoordinates, fill: str = fill) -> CausalLM:
            if fill in ("stacked", "single"):
                return model_of(path if fill == "stacked" else one_by_one, coordinates)
            model = build(config, choose(CPU), CPU, torch.float32, coordinates)
            if fill == "dummy":
                fill_dummy_weights(model, 5, moe_skew=1.0)
                return model
            incoming = IncomingWeights(model)
            incoming.check_metadata(
                list(tensors), ["float32"] * len(tensors), [list(one.shape) for one in tensors.values()]
            )
            for name, tensor in tensors.items():
                incoming.stage(name, tensor, copy=True)
            incoming.check(complete=True)
            incoming.apply()
            return model

        whole = experts_of(filled(RankCoordinates()))
        ranks = [filled(one) for one in all_coordinates(1, 2, ep=True, redundant_experts=COPIES[kind])]
        held = Counter(name for rank in ranks for name in experts_of(rank))
        assert held.keys() == whole.keys()
        assert held.total() == len(whole) // config.moe.experts * (config.moe.experts + COPIES[kind])
        for rank in ranks:
            for name, tensor in experts_of(rank).items():
                assert torch.equal(tensor, whole[name]), name


def experts_of(model: CausalLM) -> dict[str, Tensor]:
    return {name: target.view for name, target in targets(model).items() if ".experts." in name}


@pytest.mark.parametrize(("slots", "ranks"), [(8, 2), (12, 4), (16, 8), (64, 8)])
@pytest.mark.parametrize("skew", [0.0, 0.5, 1.5, 6.0])
def test_placements_hold_every_expert_and_none_twice_on_a_rank(slots: int, ranks: int, skew: float) -> None:
    source = torch.Generator().manual_seed(0)
    for experts in {slots, slots - 1, -(-slots // ranks), (slots + -(-slots // ranks)) // 2}:
        order = torch.randperm(experts, generator=source)
        load: list[float] = ((1.0 + order) ** -skew).tolist()
        placement = ExpertPlacement.balanced(load, slots, ranks)
        held = [placement.of_rank(rank) for rank in range(ranks)]
        assert all(len(set(one)) == len(one) == slots // ranks for one in held)
        assert {expert for one in held for expert in one} == set(range(experts))
        for expert, (count, *places) in enumerate(placement.copies()):
            assert [slot for slot, one in enumerate(placement.expert_S) if one == expert] == places[:count]


def test_copies_lower_the_load_of_the_busiest_rank() -> None:
    load = [100.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0]
    without, with_copies = (ExpertPlacement.balanced(load, slots, 4).imbalance(load) for slots in (8, 12))
    assert without > 3.3
    assert with_copies < 1.1


@pytest.mark.parametrize(
    ("copies", "ranks", "message"),
    [
        (3, 2, "redundant_experts is 3; allowed: 2, 4, …, at most 12, for the model's 12 experts on 2 ranks"),
        (14, 2, "redundant_experts is 14; allowed: 2, 4, …, at most 12"),
        (3, 4, "redundant_experts is 3; allowed: 4, 8, …, at most 36"),
    ],
)
def test_copies_that_ranks_cannot_hold_are_refused(copies: int, ranks: int, message: str, tmp_path: Path) -> None:
    config = read_config(make_model("qwen3-moe", tmp_path))
    with pytest.raises(InvalidField, match=message):
        ShardPlan.of(config, RankCoordinates(ranks=ranks, ep=True, redundant_experts=copies))

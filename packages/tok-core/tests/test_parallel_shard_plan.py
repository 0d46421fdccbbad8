"""Shard plans together cover the whole model; impossible ones are rejected with the reason."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tok_core.config import RankCoordinates, all_coordinates
from tok_core.errors import InvalidField
from tok_core.model_config.model_config import ModelConfig
from tok_core.parallel.shard_plan import ShardPlan, layer_cost, layers_per_stage, stage_layers

LLAMA_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    rms_norm_eps=1e-5,
    rope_base=500_000.0,
    rope_scaling=None,
    max_positions=8192,
    windows=(None,) * 32,
    tied=False,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    dtype=torch.bfloat16,
    eos_token_ids=(128001,),
    bos_token_id=128000,
)
LLAMA_70B = replace(LLAMA_8B, hidden_size=8192, num_layers=80, num_heads=64, num_kv_heads=8, intermediate_size=28672)


@settings(max_examples=50, deadline=None)
@given(
    kv_heads=st.integers(1, 12),
    group=st.integers(1, 8),
    ranks=st.integers(1, 16),
    width=st.integers(1, 9),
    vocabulary=st.integers(16, 5000),
    layers=st.integers(1, 20),
    stages=st.integers(1, 6),
)
def test_shard_plans_cover_the_model_once_and_kv_heads_at_least_once(
    kv_heads: int, group: int, ranks: int, width: int, vocabulary: int, layers: int, stages: int
) -> None:
    heads = kv_heads * group
    assume(heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0) and stages <= layers)
    config = replace(
        LLAMA_8B,
        num_heads=heads,
        num_kv_heads=kv_heads,
        intermediate_size=width * ranks,
        vocab_size=vocabulary,
        num_layers=layers,
    )
    plans = [ShardPlan.of(config, coordinates) for coordinates in all_coordinates(stages, ranks)]
    first_stage = plans[:ranks]
    for name, size in (("heads", heads), ("intermediate", width * ranks), ("vocabulary", vocabulary)):
        parts = [getattr(plan, name) for plan in first_stage]
        assert [entry for part in parts for entry in range(part.start, part.stop)] == list(range(size))
        assert {part.size for part in parts} == {size}
        assert max(part.count for part in parts) - min(part.count for part in parts) <= (name == "vocabulary")
    own = [range(plan.kv_heads.start, plan.kv_heads.stop) for plan in first_stage]
    assert {head for part in own for head in part} == set(range(kv_heads))
    for plan, kv in zip(first_stage, own, strict=True):
        # Each query head's key/value head is on the same rank, at the index that its own local index implies.
        local = plan.heads.count // len(kv)
        for number, head in enumerate(range(plan.heads.start, plan.heads.stop)):
            assert head // group == kv[number // local]
    assert [layer for plan in plans[::ranks] for layer in plan.layers] == list(range(layers))
    assert all(plan.layers and plan.local(config).num_layers == len(plan.layers) for plan in plans)


@given(
    layers=st.integers(1, 9),
    stages=st.integers(1, 5),
    cost=st.integers(1, 50),
    first=st.integers(0, 100),
    last=st.integers(0, 300),
)
def test_layer_split_minimizes_the_cost_of_the_costliest_stage(
    layers: int, stages: int, cost: int, first: int, last: int
) -> None:
    assume(stages <= layers)

    def costliest(counts: list[int]) -> int:
        costs = [count * cost for count in counts]
        costs[0] += first
        costs[-1] += last
        return max(costs)

    every = [
        [b - a for a, b in zip((0, *ends), (*ends, layers), strict=True)]
        for ends in combinations(range(1, layers), stages - 1)
    ]
    found = layers_per_stage(layers, cost, first, last, stages)
    assert found in every
    assert costliest(found) == min(map(costliest, every))


def test_layer_split_accounts_for_the_cost_of_the_lm_head() -> None:
    # The LM head costs as much as 2.4 layers of the small model, or 1.2 of the large one.
    assert [len(part) for part in stage_layers(LLAMA_8B, 2)] == [17, 15]
    assert [len(part) for part in stage_layers(LLAMA_70B, 4)] == [20, 21, 20, 19]
    head = LLAMA_8B.vocab_size * LLAMA_8B.hidden_size / layer_cost(LLAMA_8B)
    assert 2 < head < 3


def test_local_config_of_a_rank_has_its_shard_sizes() -> None:
    local = ShardPlan.of(LLAMA_70B, RankCoordinates(1, 4, 3, 16)).local(LLAMA_70B)
    assert (local.num_heads, local.num_kv_heads, local.intermediate_size, local.num_layers) == (4, 1, 1792, 21)
    assert local.head_dim == LLAMA_70B.head_dim


@pytest.mark.parametrize(
    ("changes", "coordinates", "message"),
    [
        ({}, RankCoordinates(0, 1, 0, 3), "tp is 3; allowed: divisors of 32, the model's query heads"),
        (
            {"num_heads": 36, "num_kv_heads": 4},
            RankCoordinates(0, 1, 0, 6),
            "tp is 6; allowed: divisors and multiples of 4, the",
        ),
        (
            {"intermediate_size": 14337},
            RankCoordinates(0, 1, 0, 2),
            "tp is 2; allowed: divisors of 14337, the model's interm",
        ),
        ({"vocab_size": 3}, RankCoordinates(0, 1, 0, 4), "tp is 4; allowed: at most 3, the model's vocabulary"),
        ({}, RankCoordinates(0, 33, 0, 1), "pp is 33; allowed: at most 32, the model's layers"),
    ],
)
def test_impossible_shard_plan_is_rejected_with_the_reason(
    changes: dict[str, int], coordinates: RankCoordinates, message: str
) -> None:
    with pytest.raises(InvalidField, match=message):
        ShardPlan.of(replace(LLAMA_8B, **changes), coordinates)  # type: ignore[arg-type]

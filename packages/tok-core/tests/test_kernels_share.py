"""Kernels are measured on the shapes of the first rank's shard of the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.tiny_models import make_model
from tok_core import EngineConfig
from tok_core.config import RankCoordinates
from tok_core.errors import InvalidField
from tok_core.model_config.model_config import read_config
from tok_core.parallel.shard_plan import ShardPlan
from tok_core.worker.startup.kernel_report import shard_shape, time_kernels
from tok_kernels import AttentionShape


def on_cpu(path: Path, tp: int) -> EngineConfig:
    return EngineConfig(model=str(path), device="cpu", dtype="bfloat16", page_size=8, tp=tp)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_kernel_choice_uses_the_shard_shapes_of_the_first_rank(tmp_path: Path, tp: int) -> None:
    path = make_model("llama", tmp_path, vocab_size=511)
    config = read_config(path)
    shard_plan = ShardPlan.of(config, RankCoordinates(ranks=tp))
    local = shard_plan.local(config)
    device, model = shard_shape(on_cpu(path, tp), {})
    assert device == torch.device("cpu")
    assert model.attention == AttentionShape(
        4 // tp, max(2 // tp, 1), local.head_dim, 8, local.num_layers, torch.bfloat16, torch.bfloat16
    )
    assert (model.hidden_size, model.intermediate_size) == (config.hidden_size, local.intermediate_size)
    assert (local.intermediate_size * tp, local.num_layers) == (config.intermediate_size, config.num_layers)
    assert model.vocab_size == shard_plan.vocabulary.count == config.vocab_size // tp


def test_kernel_choice_shards_explicitly_given_model_sizes(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path)
    sizes = {"heads": 64, "kv_heads": 8, "head_dim": 128, "layers": 80}
    shape = shard_shape(on_cpu(path, 4), sizes)[1].attention
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.layers) == (16, 2, 128, 80)


def test_kernel_choice_rejects_tp_that_does_not_divide_query_heads(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path)
    with pytest.raises(InvalidField, match=r"^tp is 3; allowed: divisors of 4, the model's query heads$"):
        time_kernels(on_cpu(path, 3))

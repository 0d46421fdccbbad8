"""A mixture of experts is one FeedForward and one model class: Qwen3-MoE's, in plain torch, equals transformers'."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from support.sequences import Sequences
from support.tiny_models import make_model
from tok_core.config import RankCoordinates
from tok_core.model_config import ModelConfig, read_config
from tok_core.models import CausalLM, load
from tok_core.models.layers import FeedForward, Linear, Placement, RMSNorm
from tok_core.models.qwen3 import Qwen3Layer
from tok_core.parallel import ShardPlan, Slice, TPLayout
from tok_core.quantization import WeightTarget
from tok_kernels import choose

EXPERTS, CHOSEN, SIZE = 6, 2, 48
CPU = torch.device("cpu")
TOKENS = torch.randint(0, 512, (40,), generator=torch.Generator().manual_seed(1)).tolist()


class Experts(nn.Module):
    """The experts' matrices, stacked; a checkpoint holds them one by one."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        super().__init__()
        self.gate_up = placement.parameter(EXPERTS, 2 * SIZE, config.hidden_size)
        self.down = placement.parameter(EXPERTS, config.hidden_size, SIZE)

    def targets(self) -> Iterator[tuple[str, WeightTarget]]:
        for expert in range(EXPERTS):
            gate, up = self.gate_up[expert].chunk(2)
            for name, view in (("gate_proj", gate), ("up_proj", up), ("down_proj", self.down[expert])):
                parts = tuple(Slice.whole(size) for size in view.shape)
                yield f"experts.{expert}.{name}.weight", WeightTarget(view, parts)


class MixtureOfExperts(FeedForward):
    """Each token's CHOSEN most likely experts, weighted by their normalised probabilities."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        super().__init__()
        self.gate = Linear(Slice.whole(config.hidden_size), {"gate": Slice.whole(EXPERTS)}, placement)
        self.experts = Experts(config, placement)

    def forward(self, x_TN: Tensor, norm: RMSNorm, layout: TPLayout | None = None) -> Tensor:
        assert layout is None
        normed_TN = norm(x_TN)
        logits_TE: Tensor = self.gate(normed_TN)
        weight_TC, expert_TC = logits_TE.softmax(-1).topk(CHOSEN)
        weight_TC = weight_TC / weight_TC.sum(-1, keepdim=True)
        gate_ETF, up_ETF = (normed_TN @ self.experts.gate_up.transpose(1, 2)).chunk(2, dim=-1)
        out_ETN = (functional.silu(gate_ETF) * up_ETF) @ self.experts.down.transpose(1, 2)
        chosen_TCN = out_ETN.transpose(0, 1).gather(1, expert_TC.unsqueeze(-1).expand(-1, -1, x_TN.shape[1]))
        added_TN: Tensor = (weight_TC.unsqueeze(-1) * chosen_TCN).sum(1)
        return x_TN + added_TN


class MoELayer(Qwen3Layer):
    def feed_forward(self, config: ModelConfig, placement: Placement) -> FeedForward:
        return MixtureOfExperts(config, placement)


class MoEForCausalLM(CausalLM):
    layer = MoELayer


def test_mixture_of_experts_has_the_logits_of_transformers(tmp_path: Path) -> None:
    config = read_config(make_model("qwen3", tmp_path / "dense"))
    shape = Qwen3MoeConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_base},
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        moe_intermediate_size=SIZE,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )
    torch.manual_seed(1)
    theirs = Qwen3MoeForCausalLM(shape).float().eval()
    for parameter in theirs.parameters():  # so large that every position and expert matters
        nn.init.normal_(parameter, std=0.2)
    theirs.save_pretrained(tmp_path / "moe")
    placement = Placement(choose(CPU), CPU, torch.float32, ShardPlan.of(config, RankCoordinates()))
    model = MoEForCausalLM(replace(config, tied=False), placement).eval()
    load(model, tmp_path / "moe")
    found = Sequences(model, 1, 16).feed([(0, TOKENS)], range(len(TOKENS)))
    with torch.inference_mode():
        expected = theirs(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.std()))

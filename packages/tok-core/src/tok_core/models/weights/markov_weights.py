"""Choose weights by hand with which a model speaks a Markov language of known entropy."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tok_core.errors import InvalidField
from tok_core.model_config import ModelConfig
from tok_core.models.weights.targets import EMBEDDING, HEAD, NORM
from tok_core.quantization import WeightTarget

GAIN = 64.0  # of the successor's coordinate over the token's own, so that the latter hardly matters
GATE = 4.0  # input of the SiLU that lets a successor's code pass


class Entries(NamedTuple):
    """Entries of a checkpoint's tensor, `value` at the positions `at`, int64 `[n, axes]`. `empty`: all others are 0."""

    at: Tensor
    value: Tensor
    empty: bool = False

    def write(self, target: WeightTarget) -> None:
        """Write the entries that the target holds."""
        if self.empty:
            target.view.zero_()
        start, stop = (torch.tensor([getattr(part, end) for part in target.parts]) for end in ("start", "stop"))
        own = ((self.at >= start) & (self.at < stop)).all(dim=1)
        at = (self.at[own] - start).to(target.view.device)
        target.view[tuple(at.T)] = self.value[own].to(target.view)


def markov_entries(
    config: ModelConfig, probability: float, temperature: float, eos_probability: float | None, seed: int
) -> dict[str, Entries]:
    """Return the weights with which each token is followed by its successor with this probability, by name.

    Every other token follows with equal probabilities, end ids with `eos_probability` together. S = (size − 2) / 2
    tokens are the successors, in a cycle: each is the successor of the one before it, and of other tokens by chance. A
    hidden state has the coordinates

        0: 1   |   1 … S: code of the token, if it is a successor   |   S + 1 … 2S: code of its successor   |   last

    where a code is a single 1, and the last coordinate is 1 in place of a code. The MLP of the last layer adds the
    second code, times GAIN, to the first, with which the LM head is compared. Other layers add next to nothing.

    Raises InvalidField for a model whose last layer has no MLP that is wide enough.
    """
    size, vocab, states = config.hidden_size, config.vocab_size, (config.hidden_size - 2) // 2
    last = config.num_layers - 1
    if (config.moe is not None and last in config.moe.layers) or config.intermediate_size < states:
        raise InvalidField("markov_probability", probability, "none, because the last layer has no MLP wide enough")
    source = torch.Generator().manual_seed(seed)
    ends = list(config.eos_token_ids) if eos_probability is not None else []
    end = eos_probability or 0.0
    others = torch.tensor([token for token in range(vocab) if token not in config.eos_token_ids])
    successor_S = others[torch.randperm(len(others), generator=source)[:states]]  # the cycle
    states = len(successor_S)
    code_V = torch.full((vocab,), size - 1)
    code_V[successor_S] = torch.arange(1, states + 1)
    next_V = torch.randint(states, (vocab,), generator=source)
    next_V[successor_S] = (torch.arange(states) + 1) % states
    token_V, state_S = torch.arange(vocab), torch.arange(states)
    one_V, one_S = torch.ones(vocab), torch.ones(states)
    rest = (vocab - 1 - len(ends)) / (1 - probability - end)  # 1 / probability of a token that is nobody's successor
    lift_V = torch.ones(vocab)
    gains = torch.zeros(vocab)
    if ends:
        gains[ends] = temperature * math.log(rest * end / len(ends))
    root = math.sqrt((3 + GAIN**2) / size)  # root mean square of the last hidden state
    norm = torch.cat((torch.tensor([root]), temperature * math.log(rest * probability) * root / GAIN * one_S))
    embedding = Entries(
        torch.cat([torch.stack((token_V, column), 1) for column in (0 * token_V, code_V, states + 1 + next_V)]),
        torch.cat((lift_V + gains if config.tied else lift_V, one_V, one_V)),
        empty=True,
    )
    scale = math.sqrt(3 / size)  # of a 1 before the MLP's norm
    passed = GATE / (1 + math.exp(-GATE))
    layer = f"model.layers.{last}"
    gate, up = torch.stack((state_S, 0 * state_S), 1), torch.stack((state_S, states + 1 + state_S), 1)
    down = torch.stack((1 + state_S, state_S), 1)
    entries = {
        EMBEDDING: embedding,
        NORM: Entries(torch.arange(states + 1).unsqueeze(1), norm, empty=True),
        f"{layer}.post_attention_layernorm.weight": Entries(torch.arange(size).unsqueeze(1), torch.ones(size)),
        f"{layer}.mlp.gate_proj.weight": Entries(gate, GATE * scale * one_S, empty=True),
        f"{layer}.mlp.up_proj.weight": Entries(up, scale * one_S, empty=True),
        f"{layer}.mlp.down_proj.weight": Entries(down, GAIN / passed * one_S, empty=True),
    }
    if not config.tied:
        at = torch.cat((torch.stack((token_V, 0 * token_V), 1), torch.stack((token_V, code_V), 1)))
        entries[HEAD] = Entries(at, torch.cat((gains, one_V)), empty=True)
    return entries

"""Construct weights with which a model samples from a Markov chain of known entropy."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tok_core.errors import InvalidField
from tok_core.model_config import ModelConfig
from tok_core.models.weights.targets import EMBEDDING, HEAD, NORM
from tok_core.quantization import WeightTarget

GAIN = 64.0  # factor of the successor's code over the token's own code, so that the latter hardly matters
GATE = 4.0  # input of the SiLU in the last MLP
MAX_STATES = 256  # tokens of the language: so few that a sample of some hundred tokens shows most transitions
NEVER = 40.0  # nats by which tokens outside the language are less probable


class SparseEntries(NamedTuple):
    """Entries of a checkpoint's tensor: `value` at `position`, int64 `[n, axes]`.

    zero_others  set all other entries to 0; else they keep their values
    """

    position: Tensor
    value: Tensor
    zero_others: bool = False

    def write(self, target: WeightTarget) -> None:
        """Write the entries that the target holds."""
        if self.zero_others:
            target.view.zero_()
        start, stop = (torch.tensor([getattr(part, end) for part in target.parts]) for end in ("start", "stop"))
        own = ((self.position >= start) & (self.position < stop)).all(dim=1)
        index = (self.position[own] - start).to(target.view.device)
        target.view[tuple(index.T)] = self.value[own].to(target.view)


def markov_entries(
    config: ModelConfig, probability: float, temperature: float, eos_probability: float | None, seed: int
) -> dict[str, SparseEntries]:
    """Return weights, by name, with which each token is followed by its successor with this probability.

    The language has S = min((size − 2) / 2, MAX_STATES) tokens, which form a cycle. The others of them follow with
    equal probabilities, the end ids with `eos_probability` in total, and tokens outside the language never. These can
    be in a prompt; each has a random token of the language as its successor. A token's hidden state has the coordinates

        0: 1   |   1 … S: one-hot code of the token   |   S + 1 … 2S: one-hot code of its successor   |   last

    A token outside the language has no code; its last coordinate is 1 instead. The MLP of the last layer adds the
    successor's code, times GAIN, to coordinates 1 … S, and −GAIN to the last one, all of which the LM head reads. Other
    layers add next to nothing.

    Raises InvalidField for a model whose last layer has no MLP that is wide enough.
    """
    size, vocab, states = config.hidden_size, config.vocab_size, min((config.hidden_size - 2) // 2, MAX_STATES)
    last = config.num_layers - 1
    if (config.moe is not None and last in config.moe.layers) or config.intermediate_size <= states:
        raise InvalidField("markov_probability", probability, "none, because the last layer has no MLP wide enough")
    source = torch.Generator().manual_seed(seed)
    ends = list(config.eos_token_ids) if eos_probability is not None else []
    end = eos_probability or 0.0
    others = torch.tensor([token for token in range(vocab) if token not in config.eos_token_ids])
    successor_S = others[torch.randperm(len(others), generator=source)[:states]]  # the cycle
    states = len(successor_S)
    code_V = torch.full((vocab,), size - 1)
    code_V[successor_S] = torch.arange(1, states + 1)
    coded_V = torch.ones(vocab)
    coded_V[ends] = 0
    next_V = torch.randint(states, (vocab,), generator=source)
    next_V[successor_S] = (torch.arange(states) + 1) % states
    token_V, state_S = torch.arange(vocab), torch.arange(states)
    one_V, one_S = torch.ones(vocab), torch.ones(states)
    rest = (states - 1) / (1 - probability - end)  # 1 / probability of each other token of the language
    lift_V = torch.ones(vocab)
    gains = torch.zeros(vocab)
    if ends:
        gains[ends] = temperature * math.log(rest * end / len(ends))
    root = math.sqrt((3 + 2 * GAIN**2) / size)  # root mean square of the last hidden state
    successor, outside = temperature * math.log(rest * probability), temperature * NEVER
    norm = root * torch.cat((torch.ones(1), successor / GAIN * one_S, torch.tensor([outside / GAIN])))
    embedding = SparseEntries(
        torch.cat([torch.stack((token_V, column), 1) for column in (0 * token_V, code_V, states + 1 + next_V)]),
        torch.cat((lift_V + gains if config.tied else lift_V, coded_V, one_V)),
        zero_others=True,
    )
    scale = math.sqrt(3 / size)  # root mean square of the hidden state before the MLP's norm
    passed = GATE / (1 + math.exp(-GATE))  # SiLU(GATE)
    layer = f"model.layers.{last}"
    neuron = torch.arange(states + 1)  # one for each successor, and the last for tokens outside the language
    gate = torch.stack((neuron, 0 * neuron), 1)
    up = torch.stack((neuron, torch.cat((states + 1 + state_S, torch.zeros(1, dtype=torch.int64)))), 1)
    down = torch.stack((torch.cat((1 + state_S, torch.tensor([size - 1]))), neuron), 1)
    one_N, sign_N = torch.ones(states + 1), torch.cat((one_S, -torch.ones(1)))
    entries = {
        EMBEDDING: embedding,
        NORM: SparseEntries(torch.tensor([*range(states + 1), size - 1]).unsqueeze(1), norm, zero_others=True),
        f"{layer}.post_attention_layernorm.weight": SparseEntries(torch.arange(size).unsqueeze(1), torch.ones(size)),
        f"{layer}.mlp.gate_proj.weight": SparseEntries(gate, GATE * scale * one_N, zero_others=True),
        f"{layer}.mlp.up_proj.weight": SparseEntries(up, scale * one_N, zero_others=True),
        f"{layer}.mlp.down_proj.weight": SparseEntries(down, GAIN / passed * sign_N, zero_others=True),
    }
    if not config.tied:
        index = torch.cat((torch.stack((token_V, 0 * token_V), 1), torch.stack((token_V, code_V), 1)))
        entries[HEAD] = SparseEntries(index, torch.cat((gains, coded_V)), zero_others=True)
    return entries

"""Write tiny EAGLE-3 heads as checkpoints, and compute their drafts in plain PyTorch.

Some drafted tokens are accepted, by the choice of weights. The target model is almost a Markov chain: its layers add
little to the token's embedding, and its LM head is not tied. The head attends mostly to its own row, by large biases of
queries and keys, and passes the token's embedding on. All other weights are noise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from support.tiny_models import LLAMA3_ROPE, change_weights, make_model, reference_model

STREAMS = (0, 1, 2)  # layers whose input the tiny heads read
HEADS, HEAD_DIM = 4, 16
EPS = 1e-5
BASE = 10_000.0


def make_target(directory: Path, kind: str = "llama-untied", seed: int = 0, layers: int = 3) -> Path:
    """Write a tiny model whose layers add little, and of certain answers; return `directory`."""
    make_model(kind, directory, seed=seed, layers=layers, max_positions=256, tied=False, rope=LLAMA3_ROPE)

    def weaken(weights: dict[str, Tensor]) -> None:
        for name, weight in weights.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight *= 0.02
            elif name == "lm_head.weight":
                weight *= 3

    return change_weights(directory, weaken)


def make_head(
    directory: Path,
    target: Path,
    *,
    draft_vocab_size: int = 490,
    own_embedding: bool = False,
    noise: float = 0.01,
    focus: float = 6.0,
    **config: object,
) -> Path:
    """Write a head for the model in `target`; return `directory`.

    own_embedding  store a copy of the target model's embedding
    noise          standard deviation of the weights that are noise
    focus          biases of queries and keys; with smaller ones, a row reads more of other rows
    config         keys of config.json to add or to replace
    """
    directory.mkdir(parents=True)
    of_target = load_file(target / "model.safetensors")
    embedding = of_target["model.embed_tokens.weight"]
    vocab_size, size = embedding.shape
    source = torch.Generator().manual_seed(7)

    def random(*shape: int) -> Tensor:
        return noise * torch.randn(shape, generator=source)

    ids = torch.randperm(vocab_size, generator=source)[:draft_vocab_size].sort().values
    known = torch.zeros(vocab_size, dtype=torch.bool)
    known[ids] = True
    width, both = HEADS * HEAD_DIM, 2 * size
    layer = {
        "input_layernorm.weight": 1 + random(size),
        "hidden_norm.weight": 1 + random(size),
        "post_attention_layernorm.weight": 1 + random(size),
        **{f"self_attn.{name}_proj.weight": random(width, both) for name in "qkv"},
        **{f"self_attn.{name}_proj.bias": torch.full((width,), focus) for name in "qk"},
        "self_attn.v_proj.bias": torch.zeros(width),
        "self_attn.o_proj.weight": random(size, width),
        "self_attn.o_proj.bias": torch.zeros(size),
        "mlp.gate_proj.weight": random(128, size),
        "mlp.up_proj.weight": random(128, size),
        "mlp.down_proj.weight": random(size, 128),
    }
    layer["self_attn.v_proj.weight"][:, :size] += torch.eye(width, size)
    layer["self_attn.o_proj.weight"] += torch.eye(size, width)
    weights = {
        **{f"midlayer.{name}": weight for name, weight in layer.items()},
        "fc.weight": random(size, len(STREAMS) * size),
        "norm.weight": of_target["model.norm.weight"] + random(size),
        "lm_head.weight": of_target["lm_head.weight"][ids] + random(draft_vocab_size, size),
        "d2t": ids - torch.arange(draft_vocab_size),
        "t2d": known,
    }
    if own_embedding:
        weights["embed_tokens.weight"] = embedding.clone()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    settings = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": size,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "attention_bias": True,
        "rms_norm_eps": EPS,
        "rope_theta": BASE,
        "max_position_embeddings": 256,
        "vocab_size": vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(STREAMS), "use_aux_hidden_state": True},
        **config,
    }
    (directory / "config.json").write_text(json.dumps(settings))
    return directory


@dataclass
class ReferenceHead:
    """EAGLE-3 head in plain PyTorch, without cache: all rows are computed anew for each drafted token."""

    path: Path
    target: Path

    def __post_init__(self) -> None:
        self.weights = load_file(self.path / "model.safetensors")
        config = json.loads((self.path / "config.json").read_text())
        self.norm_before_residual = config.get("norm_before_residual", False)
        self.embedding = load_file(self.target / "model.safetensors")["model.embed_tokens.weight"]
        self.ids = self.weights["d2t"] + torch.arange(len(self.weights["d2t"]))

    def draft(self, tokens: Sequence[int], count: int, choose: Callable[[Tensor, int], int]) -> list[int]:
        """Return `count` tokens after `tokens`, each chosen by the head's logits and the token's position."""
        fed = torch.tensor(list(tokens))
        with torch.inference_mode():
            found = reference_model(self.target)(fed[None, :-1], output_hidden_states=True).hidden_states
        hidden = torch.cat([found[layer][0] for layer in STREAMS], 1) @ self.weights["fc.weight"].T
        drafted = list[int]()
        for _ in range(count):
            output = self._rows(self.embedding[fed[1:]], hidden)
            logits = self._norm(output[-1:], "norm") @ self.weights["lm_head.weight"].T
            drafted.append(int(self.ids[choose(logits, len(fed))]))
            fed = torch.cat((fed, torch.tensor(drafted[-1:])))
            hidden = torch.cat((hidden, output[-1:]))
        return drafted

    def _rows(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """Return the layer's output of all rows, before the final norm."""
        normed = self._norm(hidden, "midlayer.hidden_norm")
        both = torch.cat((self._norm(embedding, "midlayer.input_layernorm"), normed), 1)
        q, k, v = (self._linear(both, f"self_attn.{name}_proj").view(-1, HEADS, HEAD_DIM) for name in "qkv")
        q, k, v = (one.transpose(0, 1) for one in (_rotated(q), _rotated(k), v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)
        x = (normed if self.norm_before_residual else hidden) + self._linear(attended, "self_attn.o_proj")
        y = self._norm(x, "midlayer.post_attention_layernorm")
        gated = functional.silu(self._linear(y, "mlp.gate_proj")) * self._linear(y, "mlp.up_proj")
        return x + self._linear(gated, "mlp.down_proj")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], EPS)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        name = f"midlayer.{name}"
        return functional.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))


def _rotated(x: Tensor) -> Tensor:
    """Rotate rows at positions 0, 1, …: the first half of a head's entries with the second half."""
    angle = torch.arange(len(x))[:, None] / BASE ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = (one[:, None] for one in (angle.cos(), angle.sin()))
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

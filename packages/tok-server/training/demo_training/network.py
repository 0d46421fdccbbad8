"""Create the network, a small Llama of transformers, and write it to a directory."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from demo_training.tokenizer import VOCAB_SIZE

BOS, END_IDS = 0, [4, 1]  # ids of the tokenizer's special tokens; END_IDS: end of turn, end of text

SHAPE: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "bos_token_id": BOS,
    "eos_token_id": END_IDS,
    "torch_dtype": "bfloat16",
}


def make_network(seed: int) -> LlamaForCausalLM:
    """Return a network with new random weights in fp32."""
    torch.manual_seed(seed)
    shape = {key: value for key, value in SHAPE.items() if key not in ("architectures", "model_type", "torch_dtype")}
    return LlamaForCausalLM(LlamaConfig(**shape)).float()


def save_network(network: LlamaForCausalLM, directory: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors in bf16.

    The configuration uses only keys that transformers has read since version 4 (`rope_theta`, `torch_dtype`).
    """
    _write(directory / "config.json", SHAPE)
    _write(directory / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": END_IDS})
    weights = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in network.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    file = directory / "model.safetensors"
    save_file(weights, file, {"format": "pt"})
    file.chmod(0o644)  # save_file makes it readable for its owner only


def _write(file: Path, content: dict[str, object]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

"""Write tiny random models as whole model directories, and compute transformers' answers for them.

With transformers' own initialisation greedy decoding repeats one token, which hides errors. With norm weights near 1,
embeddings of std 1 and linears of std 0.25 every position matters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from support.tiny_tokenizer import SPECIAL_TOKENS, write_tokenizer

KINDS = ("llama", "llama-untied", "llama3", "mistral", "qwen2", "qwen3", "mixtral", "qwen2-moe", "qwen3-moe")
CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "mistral": MistralConfig,
    "qwen2-window": Qwen2Config,
    "qwen3-window": Qwen3Config,
    "llama": LlamaConfig,
    "llama-untied": LlamaConfig,
    "llama3": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "mixtral": MixtralConfig,
    "qwen2-moe": Qwen2MoeConfig,
    "qwen3-moe": Qwen3MoeConfig,
}
BIASES = {
    "llama": ("attention_bias", "mlp_bias"),
    "mistral": (),
    "mixtral": (),
    "qwen2": (),
    "qwen2_moe": (),
    "qwen3": ("attention_bias",),
    "qwen3_moe": ("attention_bias",),
}
UNTIED = ("llama-untied", "qwen3", "qwen3-moe")
EXPERTS: dict[str, dict[str, object]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    # An MLP in the first layer, and experts in the second.
    "qwen2-moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
        "decoder_sparse_step": 2,
    },
    "qwen3-moe": {
        "num_experts": 12,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
}
# Sliding windows of every layer, of the last one, and of the first: no multiple of a page, shorter than most prompts.
WINDOWS: dict[str, dict[str, object]] = {
    "mistral": {"sliding_window": 37},
    "qwen2-window": {"sliding_window": 21, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3-window": {
        "sliding_window": 33,
        "use_sliding_window": True,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
# Wavelengths from 6 to 600 000 positions: some kept, some blended, some stretched within 200 tokens.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def make_model(
    kind: str,
    directory: Path,
    *,
    seed: int = 0,
    tied: bool | None = None,
    vocab_size: int = 512,
    layers: int = 2,
    head_dim: int | None = None,
    hidden_size: int = 64,
    max_positions: int = 1024,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    biases: bool = False,
    generation_config: bool = True,
    rope: Mapping[str, object] | None = None,
) -> Path:
    """Write a random model of one of `CONFIGS`, with tokenizer and chat template; return `directory`.

    There are 4 query and 2 key/value heads, of size 16 (qwen3: 32). Equal seeds give equal weights.
    `biases` adds a bias to every projection that can have one (qwen2 always has biases on q, k and v).
    `rope` replaces the kind's own RoPE settings. `<|end_of_text|>` and `<|eot_id|>` both end a text.
    """
    first_special = write_tokenizer(directory, vocab_size)
    begin, *ends = range(first_special, first_special + len(SPECIAL_TOKENS))
    config = CONFIGS[kind](
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim or (32 if kind.startswith("qwen3") else 16),
        max_position_embeddings=max_positions,
        rope_parameters=dict(rope or (LLAMA3_ROPE if kind == "llama3" else DEFAULT_ROPE)),
        tie_word_embeddings=kind not in UNTIED if tied is None else tied,
        bos_token_id=begin,
        eos_token_id=ends,
        **dict.fromkeys(BIASES[CONFIGS[kind].model_type], biases),
        **WINDOWS.get(kind, {}),
        **EXPERTS.get(kind, {}),
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.config.architectures = [type(model).__name__]
    model.config.dtype = dtype
    randomise(model, seed)
    write_checkpoint(model.to(dtype), directory, shards)
    model.config.save_pretrained(directory)
    if generation_config:
        GenerationConfig(bos_token_id=begin, eos_token_id=ends).save_pretrained(directory)
    return directory


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Set norm weights to 1 + 0.1·n, embeddings to n, matrices and biases to 0.25·n, for standard normal n."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.1 * noise)
            elif name.endswith("embed_tokens.weight"):
                parameter.copy_(noise)
            else:
                parameter.copy_(0.25 * noise)


def write_checkpoint(model: nn.Module, directory: Path, shards: int = 1) -> None:
    """Write the parameters as safetensors: one file, or `shards` files and their index."""
    tensors: dict[str, Tensor] = {name: value.contiguous() for name, value in model.named_parameters()}
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[shard::shards]}
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def change_weights(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """Change the weights of a single-file model in place; return `directory`."""
    file = directory / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})
    return directory


def reference_greedy(
    path: Path, prompts: Sequence[Sequence[int]], new_tokens: int, dtype: torch.dtype = torch.float32
) -> list[tuple[list[int], list[float]]]:
    """Return greedy tokens and their log-probabilities by transformers, past any EOS.

    Answers are cached for the life of the process, by directory and prompt: the directory must not change.
    """
    asked = [tuple(map(int, prompt)) for prompt in prompts]
    missing = [one for one in dict.fromkeys(asked) if (path, one, new_tokens, dtype) not in _ANSWERS]
    size = _together(path, dtype)
    for batch in (missing[start : start + size] for start in range(0, len(missing), size)):
        answers = _greedy(path, batch, new_tokens, dtype)
        _ANSWERS.update({(path, one, new_tokens, dtype): answer for one, answer in zip(batch, answers, strict=True)})
    found = [_ANSWERS[path, one, new_tokens, dtype] for one in asked]
    return [(list(tokens), list(logprobs)) for tokens, logprobs in found]


def reference_logits(path: Path, tokens: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return transformers' logits `[T, V]` after each of `tokens`."""
    with torch.inference_mode():
        logits: Tensor = reference_model(path, dtype)(torch.tensor([list(tokens)])).logits[0]
    return logits


@lru_cache(maxsize=8)
def reference_model(path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return the directory's model as loaded by transformers, with eager attention."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager", local_files_only=True
    )
    return model.eval()


_ANSWERS: dict[tuple[Path, tuple[int, ...], int, torch.dtype], tuple[list[int], list[float]]] = {}


def _together(path: Path, dtype: torch.dtype) -> int:
    """Return the batch size for transformers: 1 if RoPE frequencies depend on the longest prompt of a batch."""
    rope = str(getattr(reference_model(path, dtype).config, "rope_parameters", ""))
    return 1 if "dynamic" in rope or "longrope" in rope else 16


def _greedy(
    path: Path, prompts: Sequence[tuple[int, ...]], new_tokens: int, dtype: torch.dtype
) -> list[tuple[list[int], list[float]]]:
    model, past, longest = reference_model(path, dtype), None, max(map(len, prompts))
    inputs = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    steps = []
    with torch.inference_mode():
        model(inputs[:1, -1:])  # resets the frequencies that dynamic RoPE scaling keeps from longer passes
        for _ in range(new_tokens):
            out = model(inputs, attention_mask=mask, position_ids=positions, past_key_values=past, use_cache=True)
            past, logprobs = out.past_key_values, out.logits[:, -1].float().log_softmax(-1)
            steps.append(logprobs.max(-1))
            inputs, positions = steps[-1].indices[:, None], positions[:, -1:] + 1
            mask = torch.cat((mask, torch.ones_like(inputs)), -1)
    tokens = torch.stack([step.indices for step in steps], -1).tolist()
    return list(zip(tokens, torch.stack([step.values for step in steps], -1).tolist(), strict=True))

"""bfloat16 models compute Q, K and V in float16, if its range suffices, and round them after the rotation.

Attention scores magnify the rounding errors of queries and keys.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.parallel_models import CPU, held_by_ranks, tokens_of
from support.ranks import run_ranks
from support.sequences import Sequences
from support.tiny_models import make_model
from tok_core.config import all_coordinates
from tok_core.model_config import read_config
from tok_core.models import CausalLM, build, load_checkpoint
from tok_core.models.decoder import DecoderLayer
from tok_core.models.weights.float16 import MAX_FLOAT16_RESULT
from tok_core.models.weights.targets import targets
from tok_kernels import choose
from tok_kernels.backends.reference import ReferenceBackend

reference = ReferenceBackend()

LAYER = "model.layers.1."
Q = LAYER + "self_attn.q_proj."
GAIN = LAYER + "input_layernorm.weight"


def loaded(path: Path, dtype: torch.dtype = torch.bfloat16) -> CausalLM:
    model = build(read_config(path), choose(CPU), CPU, dtype)
    load_checkpoint(model, path)
    return model


def layer_of(model: CausalLM, number: int) -> DecoderLayer:
    layer = model.model.layers[str(number)]
    assert isinstance(layer, DecoderLayer)
    return layer


def edited(path: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """Apply `change` to the tensors of each checkpoint file; return the path."""
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)
    return path


def rotated(k_TKD: Tensor, cos_sin_LD: Tensor) -> Tensor:
    """Return keys at positions from 0 up, rotated in float32 and rounded to bfloat16."""
    cos, sin = cos_sin_LD[: len(k_TKD)].unsqueeze(1).chunk(2, dim=-1)
    first, second = k_TKD.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).bfloat16()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_cached_keys_and_values_are_fp16_gemms_rounded_after_rope(kind: str, tmp_path: Path) -> None:
    model = loaded(make_model(kind, tmp_path / kind, layers=1))
    tokens = torch.tensor(tokens_of(40))
    sequences = Sequences(model, 1, 64)
    sequences.feed([(0, tokens.tolist())])
    attention, norm = layer_of(model, 0).self_attn, layer_of(model, 0).input_layernorm
    assert model.model.embed_tokens is not None
    x_TN = norm(model.model.embed_tokens(tokens), torch.float16).float()
    weight, bias = attention.qkv_proj.weight, attention.qkv_proj.bias
    assert (weight.dtype, model.get_parameter("model.layers.0.mlp.down_proj.weight").dtype) == (
        torch.float16,
        torch.bfloat16,
    )
    qkv = torch.nn.functional.linear(x_TN, weight.float(), None if bias is None else bias.float()).half()
    heads = qkv.view(len(tokens), -1, attention.head_dim)
    kv_heads = sequences.caches[0].k.shape[2]
    k, v = heads[:, -2 * kv_heads : -kv_heads], heads[:, -kv_heads:]
    k = k.float()
    if attention.k_norm is not None:
        k = reference.rms_norm(k, attention.k_norm.weight, attention.k_norm.eps)
    turned = rotated(k, model.cos_sin_LD)
    page = int(sequences.page_table_SP[0, 0])
    (cache,) = sequences.caches
    assert torch.equal(cache.k[page, :40], turned)
    assert torch.equal(cache.v[page, :40], v.bfloat16())
    # Rounding before the rotation, too, would give other keys.
    twice = rotated(k.bfloat16(), model.cos_sin_LD)
    assert not torch.equal(cache.k[page, :40], twice)


def one_entry(tensors: dict[str, Tensor]) -> None:
    tensors[Q + "weight"][3, 5] = 1e5


def a_row(tensors: dict[str, Tensor]) -> None:
    tensors[Q + "weight"][63] = 1000.0  # 64 entries: the row's norm is 8000, and that of x up to 8


def a_bias(tensors: dict[str, Tensor]) -> None:
    tensors[Q + "bias"][7] = -59_990.0


def a_gain(tensors: dict[str, Tensor]) -> None:
    tensors[GAIN][2] = 7600.0
    for name in "qkv":
        tensors[f"{LAYER}self_attn.{name}_proj.weight"][:, 2] = 0.0


def no_number(tensors: dict[str, Tensor]) -> None:
    tensors[Q + "bias"][7] = torch.nan


@pytest.mark.parametrize("change", [one_entry, a_row, a_bias, a_gain, no_number])
def test_layer_beyond_the_float16_range_stays_in_bfloat16(
    change: Callable[[dict[str, Tensor]], None], tmp_path: Path
) -> None:
    path = edited(make_model("qwen2", tmp_path, layers=3), change)
    model = loaded(path)
    dtypes = [layer_of(model, number).self_attn.qkv_proj.weight.dtype for number in range(3)]
    assert dtypes == [torch.float16, torch.bfloat16, torch.float16]
    filled = targets(model)
    for name, tensor in load_file(path / "model.safetensors").items():
        view = filled[name].view
        assert (view.dtype == torch.float16) == ("self_attn" in name and "o_proj" not in name and LAYER not in name)
        torch.testing.assert_close(view, tensor.to(view.dtype), rtol=0, atol=0, equal_nan=True)
    assert {parameter.requires_grad for parameter in model.parameters()} == {False}
    if change is not no_number:
        assert Sequences(model, 1, 64).feed([(0, tokens_of(40))]).isfinite().all()


def test_layer_split_over_files_stays_in_bfloat16_beyond_float16_range(tmp_path: Path) -> None:
    one = edited(make_model("llama", tmp_path / "one"), lambda tensors: tensors[Q + "weight"].mul_(1e4))
    many = make_model("llama", tmp_path / "many", shards=5)
    edited(many, lambda tensors: tensors[Q + "weight"].mul_(1e4) if Q + "weight" in tensors else None)
    parameters = dict(loaded(many).named_parameters())
    assert parameters[LAYER + "self_attn.qkv_proj.weight"].dtype == torch.bfloat16
    torch.testing.assert_close(parameters, dict(loaded(one).named_parameters()), rtol=0, atol=0)


@pytest.mark.parametrize("most", [MAX_FLOAT16_RESULT - 50, MAX_FLOAT16_RESULT + 50])
def test_float16_limit_bounds_the_largest_possible_qkv_output(most: float, tmp_path: Path) -> None:
    source = torch.Generator().manual_seed(1)
    direction = torch.randn(64, generator=source, dtype=torch.float64)

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[GAIN] = (torch.rand(64, generator=source) + 0.5).bfloat16().float()
        gained = direction * tensors[GAIN]
        tensors[Q + "weight"][9] = direction * (most - 1000) / (gained.norm() * 8)
        tensors[Q + "bias"][9] = 1000.0

    model = loaded(edited(make_model("qwen2", tmp_path), change))
    layer = layer_of(model, 1)
    linear, norm = layer.self_attn.qkv_proj, layer.input_layernorm
    assert (linear.weight.dtype == torch.float16) == (most < MAX_FLOAT16_RESULT)
    worst = (direction * norm.weight).bfloat16()[None].repeat(2, 1)  # parallel to a row, gains included
    found = linear(worst, norm=norm)
    assert found[:, 9].tolist() == pytest.approx([most, most], rel=0.01)


def test_ranks_agree_on_bfloat16_when_one_rank_has_the_large_row(tmp_path: Path) -> None:
    path = edited(make_model("llama", tmp_path, layers=3), lambda tensors: tensors[Q + "weight"][63].fill_(1000.0))
    alone = loaded(path)
    expected = Sequences(alone, 1, 64).feed([(0, tokens_of(40))]).float().numpy()
    for dtypes, *logits in run_ranks(all_coordinates(1, 2), held_by_ranks, path):
        assert dtypes == ["float16", "bfloat16", "float16"]
        for found in logits:
            assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()

"""In bfloat16 queries, keys and values are products in float16 that are rounded once, behind the rotation.

Scores magnify what rounding adds to either.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.sequences import Sequences
from support.tiny_models import make_model
from tok_core.model import build, load, read_config
from tok_core.model.decoder import DecoderLayer
from tok_kernels import choose, reference

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_cached_keys_and_values_are_products_in_float16_turned_and_then_rounded(kind: str, tmp_path: Path) -> None:
    path = make_model(kind, tmp_path / kind, layers=1)
    model = build(read_config(path), choose(CPU), CPU, torch.bfloat16)
    load(model, path)
    tokens = torch.randint(0, 512, (40,), generator=torch.Generator().manual_seed(1))
    sequences = Sequences(model, 1, 64)
    sequences.feed([(0, tokens.tolist())])
    layer = model.model.layers["0"]
    assert isinstance(layer, DecoderLayer)
    attention, norm = layer.self_attn, layer.input_layernorm
    assert model.model.embed_tokens is not None
    x_TN = norm(model.model.embed_tokens(tokens), torch.float16).float()
    assert (attention.qkv_proj.weight.dtype, layer.mlp.down_proj.weight.dtype) == (torch.float16, torch.bfloat16)
    qkv = torch.nn.functional.linear(x_TN, attention.qkv_proj.weight.float())
    if attention.qkv_proj.bias is not None:
        qkv += attention.qkv_proj.bias.float()
    q, k, v = (part.view(len(tokens), -1, attention.head_dim) for part in torch.split(qkv, attention.sizes, dim=-1))
    _, turned = reference.rope(q, k, torch.arange(40), model.cos_sin_LD)
    page = int(sequences.page_table_SP[0, 0])
    (cache,) = sequences.caches
    assert torch.equal(cache.k[page, :40], turned.bfloat16())
    assert torch.equal(cache.v[page, :40], v.bfloat16())
    # Rounded ahead of the rotation as well, keys would be others.
    _, twice = reference.rope(q, k.bfloat16(), torch.arange(40), model.cos_sin_LD)
    assert not torch.equal(cache.k[page, :40], twice)

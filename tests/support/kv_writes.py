"""Write keys and values to a cache by the operation of models, without rotating them."""

from __future__ import annotations

import torch
from torch import Tensor

from tok_kernels import Backend, LayerCache, rope_table


def write_unrotated(backend: Backend, k_TKD: Tensor, v_TKD: Tensor, cache: LayerCache, index_T: Tensor) -> None:
    """Write keys and values to the rows `index_T` at position 0, where RoPE is the identity for finite keys."""
    position, table = torch.zeros_like(index_T), rope_table(k_TKD.shape[-1], 1, 10000.0).to(k_TKD.device)
    backend.rope_and_write_kv(torch.zeros_like(k_TKD), k_TKD, v_TKD, position, table, cache, index_T)

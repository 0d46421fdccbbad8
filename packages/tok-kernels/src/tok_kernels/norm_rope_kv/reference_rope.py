"""Apply rotary position embedding: rotate pairs of a head's two halves by an angle proportional to the position."""

from __future__ import annotations

import torch
from torch import Tensor


def rope(q_THD: Tensor, k_TKD: Tensor, position_T: Tensor, cos_sin_LD: Tensor) -> tuple[Tensor, Tensor]:
    """Return rotated copies of queries and keys, of their own dtypes; `position_T` int64 or int32 indexes `cos_sin_LD`.

    `cos_sin_LD` is float32 as made by `tok_kernels.norm_rope_kv.rope_table`. Entry `i` is paired with entry `i + D/2`
    (Su et al. 2021, in Llama's arrangement).
    """
    cos, sin = cos_sin_LD.index_select(0, position_T).unsqueeze(1).chunk(2, dim=-1)
    return _turn(q_THD, cos, sin), _turn(k_TKD, cos, sin)


def _turn(x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x_THD.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_THD.dtype)

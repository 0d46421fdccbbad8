"""Apply bitmasks of allowed tokens to logits in place."""

from __future__ import annotations

import torch
from torch import Tensor

from tok_kernels.batch import Masks

_ROWS = 64  # rows unpacked at once, from one bit to one byte per entry; bounds the memory


def forbid(logits_RV: Tensor, masks: Masks) -> None:
    """Set the logits that their rows' masks do not allow to −inf."""
    bit = torch.arange(8, dtype=torch.uint8, device=logits_RV.device)
    for begin in range(0, len(masks.rows), _ROWS):
        rows = masks.rows[begin : begin + _ROWS]
        octets = masks.words[masks.which[begin : begin + _ROWS]].view(torch.uint8)
        allowed = (octets.unsqueeze(-1) >> bit & 1).flatten(1)[:, : logits_RV.shape[1]]
        logits_RV[rows] = logits_RV[rows].masked_fill_(allowed == 0, -torch.inf)

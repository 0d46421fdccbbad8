"""Check that linear layers compute a row with the same bits in steps of all sizes, as `batch_invariant` promises.

The order in which cuBLAS's kernels add products is not documented, and which of them runs depends on its version.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tok_core.errors import InvalidField
from tok_core.models import CausalLM, Linear, TokenEmbedding
from tok_core.runtime import HEARTBEAT

# Kernels change most often among few rows.
ROWS = (*range(1, 73), 80, 96, 100, 112, 128, 144, 160, 200, 256, 300, 320, 384, 512, 640, 777, 1000, 1024, 1536)
_MAX_ENTRIES = 1 << 27  # of a result, which limits the memory


@torch.inference_mode()
def check_rows(model: CausalLM, max_rows: int) -> None:
    """Raise InvalidField if a linear layer's results depend on the number of rows, up to `max_rows`."""
    checked = set()
    for name, module in model.named_modules():
        if not isinstance(module, Linear | TokenEmbedding):
            continue
        weight_NK = module.get_parameter("weight")
        gated = isinstance(module, Linear) and module.gated
        if (weight_NK.shape, weight_NK.dtype, gated) in checked:
            continue
        checked.add((weight_NK.shape, weight_NK.dtype, gated))
        HEARTBEAT.turned()
        most = max(1, min(max_rows, 2 * ROWS[-1], _MAX_ENTRIES // len(weight_NK)))
        different = different_rows(multiply(module, weight_NK, most), most)
        if different:
            shape = (
                f"{name}, {list(weight_NK.shape)} in {weight_NK.dtype}, gives a row other bits among {different} rows"
            )
            raise InvalidField("batch_invariant", True, f"false here ({shape} than among {most})")


def multiply(module: Linear | TokenEmbedding, weight_NK: Tensor, most: int) -> Callable[[int], Tensor]:
    """Return a function that computes the layer's operation of the backend for the first rows of a fixed input."""
    source = torch.Generator(weight_NK.device).manual_seed(0)
    outputs, inputs = weight_NK.shape
    x_TK = torch.randn((most, inputs), generator=source, device=weight_NK.device).to(weight_NK.dtype)
    if isinstance(module, Linear) and module.gated:
        return lambda rows: module.backend.gated_linear(x_TK[:rows], weight_NK)
    residual_TN = torch.randn((most, outputs), generator=source, device=weight_NK.device).to(weight_NK.dtype)
    return lambda rows: module.backend.linear(x_TK[:rows], weight_NK, residual_TN=residual_TN[:rows].clone())


def different_rows(compute: Callable[[int], Tensor], most: int) -> list[int]:
    """Return the numbers of rows, of those of ROWS below `most`, whose results have other bits than among `most`."""
    whole, sizes = compute(most).view(torch.int16), [rows for rows in ROWS if rows < most]
    differ = [(compute(rows).view(torch.int16) != whole[:rows]).any() for rows in sizes]
    found: list[bool] = torch.stack(differ).tolist() if differ else []
    return [rows for rows, is_different in zip(sizes, found, strict=True) if is_different]

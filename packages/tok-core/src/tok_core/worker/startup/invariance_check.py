"""Check that a linear layer's result for a row has the same bits in steps of all sizes, as `batch_invariant` promises.

cuBLAS documents neither the order of its sums nor its choice of kernels, which depends on its version.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tok_core.errors import InvalidField
from tok_core.models import CausalLM, Linear, TokenEmbedding
from tok_core.runtime import HEARTBEAT

# Numbers of rows to check, most of them small: there the choice of kernels changes most often.
ROWS = (*range(1, 73), 80, 96, 100, 112, 128, 144, 160, 200, 256, 300, 320, 384, 512, 640, 777, 1000, 1024, 1536)
_MAX_ENTRIES = 1 << 27  # entries of a result; bounds the memory


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
        count = max(1, min(max_rows, 2 * ROWS[-1], _MAX_ENTRIES // len(weight_NK)))
        different = differing_row_counts(layer_function(module, weight_NK, count), count)
        if different:
            shape = (
                f"{name}, {list(weight_NK.shape)} in {weight_NK.dtype}, gives a row other bits among {different} rows"
            )
            raise InvalidField("batch_invariant", True, f"false here ({shape} than among {count})")


def layer_function(module: Linear | TokenEmbedding, weight_NK: Tensor, max_rows: int) -> Callable[[int], Tensor]:
    """Return a function that applies the layer to the first rows of a fixed random input."""
    source = torch.Generator(weight_NK.device).manual_seed(0)
    outputs, inputs = weight_NK.shape
    x_TK = torch.randn((max_rows, inputs), generator=source, device=weight_NK.device).to(weight_NK.dtype)
    if isinstance(module, Linear) and module.gated:
        return lambda rows: module.backend.gated_linear(x_TK[:rows], weight_NK)
    residual_TN = torch.randn((max_rows, outputs), generator=source, device=weight_NK.device).to(weight_NK.dtype)
    return lambda rows: module.backend.linear(x_TK[:rows], weight_NK, residual_TN=residual_TN[:rows].clone())


def differing_row_counts(compute: Callable[[int], Tensor], max_rows: int) -> list[int]:
    """Return the numbers of ROWS below `max_rows` whose results have other bits than the same rows of `max_rows`."""
    reference, counts = compute(max_rows).view(torch.int16), [rows for rows in ROWS if rows < max_rows]
    differ = [(compute(rows).view(torch.int16) != reference[:rows]).any() for rows in counts]
    flags: list[bool] = torch.stack(differ).tolist() if differ else []
    return [rows for rows, differs in zip(counts, flags, strict=True) if differs]

"""Check results of the Triton attention kernels against a float64 loop or a given result."""

from __future__ import annotations

import torch
from torch import Tensor

from support.attention_cases import Case, oracle
from tok_kernels.attention.triton import attention

# ‖out − expected‖ / ‖expected‖. Scores and sums are float32; weights and results have the dtype of the queries.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}


def attend(case: Case, window: int | None = None) -> Tensor:
    """Run the kernels with all their fresh memory filled with NaN or invalid integers."""
    torch.use_deterministic_algorithms(True)
    try:
        return attention(case.q, case.cache, case.batch, case.scale, window)
    finally:
        torch.use_deterministic_algorithms(False)


def check(case: Case, expected: Tensor | None = None, window: int | None = None) -> None:
    out = attend(case, window)
    if expected is None:
        expected = torch.tensor(oracle(case, window)[0])
    assert out.dtype == case.q.dtype
    difference = (out.double().cpu() - expected.double().cpu()).norm() / expected.double().norm().cpu()
    assert float(difference) < TOLERANCE[case.q.dtype]

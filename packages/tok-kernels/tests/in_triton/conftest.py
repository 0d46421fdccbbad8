"""Run the tests of Triton kernels on a CUDA device, and interpreted on the CPU in a process that each file starts."""

from __future__ import annotations

import pytest
import torch

from support.interpreted import DEVICES


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)

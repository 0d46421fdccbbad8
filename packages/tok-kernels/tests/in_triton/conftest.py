"""Run the tests of Triton kernels on a CUDA device, and interpreted on the CPU in a process that each file starts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from support.interpreted import DEVICES, INTERPRETING
from tok_kernels import launch_config

if INTERPRETING:  # an example takes 10 to 100 ms; a GPU runs them all
    settings.register_profile("interpreted", settings.default, max_examples=30)
    settings.load_profile("interpreted")


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(scope="module")
def small_device() -> Iterator[None]:
    """Pretend a device of three multiprocessors under the interpreter, for which even idle programs are slow."""
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETING:
            patch.setattr(launch_config, "multiprocessors", lambda _device: 3)
        yield

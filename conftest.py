"""What holds for every test of the workspace: GPU tests need a GPU, and property tests repeat themselves."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# The same examples in every run: a failure seen once is seen again. `--hypothesis-profile=explore` draws new.
# How long an example takes says nothing on a machine that runs more tests beside it.
settings.register_profile(
    "repeat", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("explore", settings.get_profile("repeat"), derandomize=False)
settings.load_profile("repeat")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_cuda():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()

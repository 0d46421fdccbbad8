"""Settings of every test of the workspace: GPU tests need a GPU, property tests repeat themselves, and files may run in
any order.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
from collections.abc import Generator, Iterator
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings

from tok_core.manager.prefix_groups import CPU_COSTS
from tok_core.runtime import pause_gc

# Tests start hundreds of processes. Compiling torch and transformers anew would be half of what each costs.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

gc.disable()  # until `pytest_collection` ends: what other files import lives as long as the process

# The same examples in every run: a failure seen once is seen again. `--hypothesis-profile=explore` draws new.
# How long an example takes says nothing on a machine that runs more tests beside it.
settings.register_profile(
    "repeat", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("explore", settings.get_profile("repeat"), derandomize=False)
settings.load_profile("repeat")


@pytest.fixture(scope="session", autouse=True)
def _seeds_repeat() -> Iterator[None]:
    """Give requests without a seed the same seeds in every run: no test passes or fails by luck."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tok_core.engine.core.random", SimpleNamespace(Random=lambda: random.Random(0)))
        yield


@pytest.fixture(scope="session", autouse=True)
def _small_groups() -> Iterator[None]:
    """Let tests on GPUs form prefix groups of few, short sequences, which `COSTS` would reject."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tok_core.manager.scheduling.scheduler.COSTS", CPU_COSTS)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_user_data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep servers that tests start without --data-dir out of the user's data directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        yield


@pytest.fixture(scope="module")
def forked_children() -> Iterator[None]:
    """Fork the processes of this file's engines from a server; other files start them as users do."""
    from support.forked_children import FORKING

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tok_core.replicas.replica.subprocess", FORKING)
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--random-files`."""
    parser.addoption("--random-files", type=int, metavar="SEED", help="run test files in the order that SEED gives")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Let Ctrl-C raise KeyboardInterrupt: a shell's background jobs ignore it, and libraries leave other handlers."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while test files are imported, and never scan them later."""
    with pause_gc():
        return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no CUDA device, and shuffle the files if asked to."""
    seed: int | None = config.getoption("--random-files")
    if seed is not None:
        order = sorted({item.path for item in items})
        random.Random(seed).shuffle(order)
        rank = {path: place for place, path in enumerate(order)}
        items.sort(key=lambda item: rank[item.path])
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_cuda():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()

"""Fixtures: one tiny random model and one server of it, shared by all tests of the package."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.serving import Server, serving
from support.tiny_models import make_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.fixture(scope="session")
def server(tiny_model: Path) -> Iterator[Server]:
    with serving(tiny_model) as running:
        yield running

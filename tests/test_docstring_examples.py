"""Examples in docstrings print what is shown."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest

from support.workspace import PACKAGES, ROOT, sources

FILES = [path for package in PACKAGES for path in sources(package) if ">>> " in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_docstring_examples_print_what_is_shown(file: Path) -> None:
    parts = file.relative_to(ROOT).with_suffix("").parts  # packages, its name, src, then the module's
    found = doctest.testmod(import_module(".".join(parts[3:])))
    assert found.attempted
    assert not found.failed

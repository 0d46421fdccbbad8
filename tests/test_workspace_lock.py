"""Tests that the committed lock pins every version and names no package index."""

from __future__ import annotations

import re

import pytest

from support.lockfile import NOWHERE, Pin, addresses, addressless, constraints, pins
from support.workspace import ROOT, git

FULL = """\
version = 1
requires-python = ">=3.11"

[[package]]
name = "app"
version = "0.1.0"
source = { editable = "packages/app" }
dependencies = [
    { name = "left" },
    { name = "right", version = "1.0", source = { registry = "https://packages.example/simple" } },
]

[package.metadata]
requires-dist = [{ name = "left", specifier = ">=1" }, { name = "right" }]

[[package]]
name = "left"
version = "1.2"
source = { registry = "https://packages.example/simple" }
sdist = { url = "https://files.example/left-1.2.tar.gz", hash = "sha256:00" }
wheels = [
    { url = "https://files.example/left-1.2-py3-none-any.whl", hash = "sha256:11" },
]

[[package]]
name = "right"
version = "1.0"
source = { registry = "https://packages.example/simple" }
resolution-markers = [
    "python_full_version < '3.12'",
]
"""


def test_addressless_lock_contains_no_url() -> None:
    assert len(addresses(FULL)) == 5
    assert addresses(addressless(FULL)) == []
    assert addressless(FULL).count(NOWHERE) == 3


def test_addressless_lock_keeps_every_pin() -> None:
    assert pins(addressless(FULL)) == {Pin("left", "1.2"), Pin("right", "1.0", ("python_full_version < '3.12'",))}


def test_addressless_lock_makes_uv_resolve_again() -> None:
    assert "requires-dist = []" in addressless(FULL)


def test_addressless_is_idempotent() -> None:
    assert addressless(addressless(FULL)) == addressless(FULL)


def test_constraints_keep_environment_markers() -> None:
    assert constraints(FULL) == "left==1.2\nright==1.0 ; python_full_version < '3.12'\n"


@pytest.fixture(scope="module")
def committed() -> str:
    """The lock in git's index, which the next commit would hold."""
    if git("rev-parse", "--git-dir") is None:
        pytest.skip("this is no git checkout, so there is no committed lock")
    lock = git("show", ":uv.lock")
    assert lock is not None, "uv.lock is not committed"
    return lock


def test_the_committed_lock_names_no_index(committed: str) -> None:
    assert addresses(committed) == [], "uv.lock is committed as uv wrote it; run: uv run nox -s lock"
    assert committed == addressless(committed)


def test_the_committed_lock_pins_the_versions_of_the_working_copy(committed: str) -> None:
    assert pins(committed) == pins((ROOT / "uv.lock").read_text())


def test_the_committed_lock_pins_the_benchmarked_versions(committed: str) -> None:
    measured = {Pin("torch", "2.11.0"), Pin("triton", "3.6.0"), Pin("transformers", "5.17.0")}
    assert measured <= pins(committed)


def test_documented_clients_have_the_locked_versions(committed: str) -> None:
    text = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8").partition("\n## ")[0]
    rows = re.findall(r"^\| ([\w-]+) \| ([0-9.]+) \|", text, re.MULTILINE)
    assert len(rows) > 5
    assert {Pin(name.lower(), version) for name, version in rows} <= pins(committed)

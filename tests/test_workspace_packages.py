"""Tests of repository rules: package files, docstrings, file lengths, names, no registry hosts."""

from __future__ import annotations

import ast
import re
import tomllib

import pytest

from support.workspace import PACKAGES, ROOT, files, sources

LONGEST = 500
"""Lines; a longer file should be split."""

REGISTRIES = (
    "py" + "pi.org",
    "python" + "hosted.org",
    "npm" + "js.org",
    "crates" + ".io",
    "ana" + "conda.org",
    "download.py" + "torch.org",
    "pypi." + "nvidia.com",
)
"""Hosts of package registries, split in halves so that this file does not contain them."""


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_has_a_readme_changelog_types_and_tests(package: str) -> None:
    root = ROOT / "packages" / package
    module = root / "src" / package.replace("-", "_")
    parts = [root / "README.md", root / "CHANGELOG.md", module / "__init__.py", module / "py.typed"]
    assert [str(part) for part in parts if not part.is_file()] == []
    assert list((root / "tests").glob("test_*.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_a_changelog_begins_with_the_version_of_its_package(package: str) -> None:
    root = ROOT / "packages" / package
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    headings = [
        line for line in (root / "CHANGELOG.md").read_text(encoding="utf-8").splitlines() if line.startswith("## ")
    ]
    assert project["name"] == package
    assert headings[0].split()[1] == project["version"]


def test_every_module_has_a_docstring() -> None:
    modules = [path for package in PACKAGES for path in sources(package)]
    modules += [path for path in files() if path.suffix == ".py" and path not in modules]
    silent = [path for path in modules if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))]
    assert [str(path.relative_to(ROOT)) for path in silent] == []


def test_no_source_file_exceeds_500_lines() -> None:
    lengths = {path: len(path.read_bytes().splitlines()) for path in files() if path.suffix == ".py"}
    assert lengths
    assert {str(path.relative_to(ROOT)): length for path, length in lengths.items() if length > LONGEST} == {}


SHARED_NAMES = {"Completion", "Delta", "TokError"}
"""Public names that tok-client shares with tok-core; users import one or the other."""


def test_public_class_names_are_unique_across_packages() -> None:
    owners: dict[str, list[str]] = {}
    for package in PACKAGES:
        for path in sources(package):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    owners.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in owners.items() if len(paths) > 1 and name not in SHARED_NAMES} == {}


def test_test_files_have_unique_names() -> None:
    names = [path.name for path in files() if path.name.startswith("test_")]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_names_of_tests_have_at_most_70_characters() -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files() if path.name.startswith("test_")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    functions = [node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    names = [name for name in functions if name.startswith("test_")]
    assert len(names) > 1000
    assert [name for name in names if len(name) > 70] == []


def test_no_file_names_a_package_registry() -> None:
    lock = ROOT / "uv.lock"  # uv writes addresses into the working copy; the committed lock has a test of its own
    naming = [
        path for path in files() if path != lock and any(host.encode() in path.read_bytes() for host in REGISTRIES)
    ]
    assert [str(path.relative_to(ROOT)) for path in naming] == []


def test_every_name_in_the_glossary_is_a_class() -> None:
    rows = [line for line in (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines() if "|" in line]
    named = {name for row in rows for name in re.findall(r"`([A-Za-z]+)`", row.split("|")[1])}
    trees = [ast.parse(path.read_text(encoding="utf-8")) for package in PACKAGES for path in sources(package)]
    classes = {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    assert len(named) > 50
    assert named <= classes

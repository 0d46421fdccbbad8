"""Imports point one way: server to core to kernels, server to client, and nothing back."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from support.workspace import ROOT, sources


@dataclass(frozen=True, slots=True)
class Rule:
    """No module of `package` imports any of `forbidden`, except below the folder `unless`."""

    package: str
    forbidden: frozenset[str]
    unless: str = ""

    def files(self) -> list[Path]:
        root = ROOT / "packages" / self.package / "src"
        excepted = root / self.unless if self.unless else None
        return [path for path in sources(self.package) if excepted is None or excepted not in path.parents]


RULES = [
    Rule("tok-kernels", frozenset({"tok_core", "tok_server", "tok_client", "msgspec", "zmq", "aiohttp"})),
    Rule("tok-core", frozenset({"tok_server", "tok_client", "aiohttp"})),
    Rule("tok-client", frozenset({"tok_kernels", "tok_core", "tok_server", "torch", "numpy"})),
    Rule("tok-server", frozenset({"tok_kernels"})),
    Rule("tok-server", frozenset({"torch", "triton", "flashinfer"}), unless="tok_server/demo"),
]


def imports(source: str) -> Iterator[tuple[int, str]]:
    """(line, top-level module) of every import in `source`, those inside functions included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module.partition(".")[0]
        elif isinstance(node, ast.Call) and _is_import_by_name(node):
            yield from ((node.lineno, name.partition(".")[0]) for name in _literals(node.args))


def _is_import_by_name(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name in {"import_module", "__import__"}


def _literals(arguments: list[ast.expr]) -> list[str]:
    first = arguments[0] if arguments else None
    return [first.value] if isinstance(first, ast.Constant) and isinstance(first.value, str) else []


def test_an_import_is_seen_wherever_it_stands() -> None:
    source = """
import a.x, b
from c.y import z
from . import here
if True:
    def f():
        import d as e
        importlib.import_module("f.g")
"""
    assert [name for _, name in sorted(imports(source))] == ["a", "b", "c", "d", "f"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.package}: no {' '.join(sorted(rule.forbidden))}")
def test_no_package_imports_against_the_arrows(rule: Rule) -> None:
    checked = rule.files()
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in checked
        for line, name in imports(path.read_text(encoding="utf-8"))
        if name in rule.forbidden
    ]
    assert checked
    assert found == []


def parts_imported(source: str) -> Iterator[str]:
    """The modules and subpackages of tok_core that `source` imports, except for type checkers alone."""
    tree = ast.parse(source)
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    for_types = {id(node) for block in blocks for node in ast.walk(block)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and id(node) not in for_types:
            names = [node.module] if node.module != "tok_core" else [f"tok_core.{alias.name}" for alias in node.names]
            yield from (name.split(".")[1] for name in names if name.startswith("tok_core."))


def test_an_import_for_type_checkers_makes_no_arrow() -> None:
    source = "from tok_core import hub\nfrom tok_core.text import a\nif TYPE_CHECKING:\n    from tok_core.x import b"
    assert list(parts_imported(source)) == ["hub", "text"]


def test_no_parts_of_the_engine_import_each_other_in_a_circle() -> None:
    root = ROOT / "packages" / "tok-core" / "src" / "tok_core"
    arrows: dict[str, set[str]] = {}
    for path in sources("tok-core"):
        part = path.relative_to(root).parts[0].removesuffix(".py")
        arrows.setdefault(part, set()).update(parts_imported(path.read_text(encoding="utf-8")))
    del arrows["__init__"]
    for part, imported in arrows.items():
        imported.discard(part)
    assert len(arrows) > 15
    TopologicalSorter(arrows).prepare()  # raises CycleError


HEAVY = ("torch", "triton", "transformers", "numpy", "tok_core")

LIGHT = {
    "tok_client": ("import tok_client", HEAVY),
    "tok --help": (
        "import contextlib, tok_server.cli\nwith contextlib.suppress(SystemExit): tok_server.cli.main(['--help'])",
        ("torch", "triton", "transformers"),
    ),
}


@pytest.mark.parametrize("case", LIGHT)
def test_what_must_be_light_loads_nothing_heavy(case: str) -> None:
    statement, heavy = LIGHT[case]
    report = f"{statement}\nimport sys; print('loaded:', *(m for m in {heavy} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded:"

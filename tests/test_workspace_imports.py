"""Tests of import rules: server imports core and client, core imports kernels, and nothing imports back."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from support.workspace import PACKAGES, ROOT, sources


@dataclass(frozen=True, slots=True)
class Rule:
    """No module of `package` imports any of `forbidden`."""

    package: str
    forbidden: frozenset[str]


RULES = [
    Rule("tok-kernels", frozenset({"tok_core", "tok_server", "tok_client", "msgspec", "zmq", "aiohttp"})),
    Rule("tok-core", frozenset({"tok_server", "tok_client", "aiohttp"})),
    Rule("tok-client", frozenset({"tok_kernels", "tok_core", "tok_server", "torch", "numpy"})),
    Rule("tok-server", frozenset({"tok_kernels"})),
    Rule("tok-server", frozenset({"torch", "triton", "flashinfer"})),
]


def imports(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, top-level module) of every import in `source`, also inside functions."""
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


def test_imports_are_found_at_any_depth() -> None:
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
def test_packages_import_only_in_the_allowed_direction(rule: Rule) -> None:
    checked = sources(rule.package)
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in checked
        for line, name in imports(path.read_text(encoding="utf-8"))
        if name in rule.forbidden
    ]
    assert checked
    assert found == []


def modules_of(package: str) -> dict[str, Path]:
    """Return the modules of a package by their dotted names; a subpackage stands for its __init__."""
    root = ROOT / "packages" / package / "src"
    names = {path: path.relative_to(root).with_suffix("").parts for path in sources(package)}
    return {".".join(name[:-1] if name[-1] == "__init__" else name): path for path, name in names.items()}


def modules_imported(source: str, modules: Iterable[str]) -> Iterator[str]:
    """Yield the `modules` that the source imports, also inside functions, except under TYPE_CHECKING."""
    tree = ast.parse(source)
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    for_types = {id(node) for block in blocks for node in ast.walk(block)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and id(node) not in for_types:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in modules else node.module


def test_type_checking_imports_are_ignored() -> None:
    source = "from a import b\nfrom a.c import d\nif TYPE_CHECKING:\n    from a.x import y"
    assert list(modules_imported(source, {"a", "a.b", "a.c", "a.x"})) == ["a.b", "a.c"]


def imports_of_modules(package: str) -> dict[str, set[str]]:
    """Return the modules that each module of a package imports."""
    modules = modules_of(package)
    return {name: set(modules_imported(path.read_text(encoding="utf-8"), modules)) for name, path in modules.items()}


def arrows_between_parts(folder: str, imported: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return for each part of `folder`, a module or a subpackage, the other parts of the folder that it imports."""
    arrows: dict[str, set[str]] = {}
    for name, targets in imported.items():
        if name.startswith(f"{folder}."):
            part = name.removeprefix(f"{folder}.").partition(".")[0]
            below = {
                one.removeprefix(f"{folder}.").partition(".")[0] for one in targets if one.startswith(f"{folder}.")
            }
            arrows.setdefault(part, set()).update(below - {part})
    return arrows


@pytest.mark.parametrize("package", PACKAGES)
def test_parts_of_a_folder_have_no_import_cycles(package: str) -> None:
    imported = imports_of_modules(package)
    folders = [name for name, path in modules_of(package).items() if path.name == "__init__.py"]
    assert folders
    for folder in folders:
        TopologicalSorter(arrows_between_parts(folder, imported)).prepare()  # raises CycleError


MAX_CORE_PARTS, MAX_CORE_LAYERS = 16, 9


def test_tok_core_has_at_most_16_parts_on_9_import_layers() -> None:
    arrows = arrows_between_parts("tok_core", imports_of_modules("tok-core"))
    order, layers = TopologicalSorter(arrows), list[tuple[str, ...]]()
    order.prepare()
    while order.is_active():
        layers.append(order.get_ready())
        order.done(*layers[-1])
    assert len(arrows) <= MAX_CORE_PARTS, sorted(arrows)
    assert len(layers) <= MAX_CORE_LAYERS, layers


UNJOINED = ("tok_kernels.", "tok_server.bench")
"""Packages without façades: kernels, since Triton and FlashInfer may be missing, and benchmarks."""


def facade_of(importer: str, module: str) -> str:
    """Return the package through which `importer` must import `module`: the first that `importer` is not in."""
    here, there = importer.split("."), module.split(".")
    common = 0
    while common < min(len(here), len(there)) and here[common] == there[common]:
        common += 1
    return ".".join(there[: max(common + 1, 2)])


def test_facade_of_a_module_is_its_first_package_outside_the_importer() -> None:
    reclaimer = "tok_core.manager.scheduling.reclaimer"
    assert facade_of("tok_core.engine", reclaimer) == "tok_core.manager"
    assert facade_of("tok_core.manager", reclaimer) == "tok_core.manager.scheduling"
    assert facade_of("tok_core.manager.scheduling", reclaimer) == reclaimer
    assert facade_of("tok_server.http", "tok_core.text.tokenizer") == "tok_core.text"


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_import_other_packages_through_their_facades(package: str) -> None:
    """Imports inside functions are exempt: they name heavy modules directly, so that façades stay light."""
    found = []
    for name, path in modules_of(package).items():
        folder = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tok_"):
                ours = node.module.startswith(UNJOINED)
                if not ours and len(facade_of(folder, node.module)) < len(node.module):
                    found.append(f"{name}: {node.module}")
    assert found == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_facade_lists_its_exports_in_all(package: str) -> None:
    for name, path in modules_of(package).items():
        if path.name == "__init__.py":
            body = ast.parse(path.read_text(encoding="utf-8")).body
            imported = any(isinstance(node, ast.ImportFrom) and node.module != "__future__" for node in body)
            listed = any("__all__" in ast.unparse(node).partition("=")[0] for node in body)
            assert not imported or listed, name


MAX_FOLDER_FILES = 16


@pytest.mark.parametrize("package", PACKAGES)
def test_no_folder_holds_more_than_16_modules(package: str) -> None:
    counts = Counter(path.parent for path in sources(package) if path.name != "__init__.py")
    assert {str(folder.relative_to(ROOT)): count for folder, count in counts.items() if count > MAX_FOLDER_FILES} == {}


HEAVY = ("torch", "triton", "transformers", "numpy", "tok_core")

LIGHT = {
    "tok_client": ("import tok_client", HEAVY),
    "tok --help": (
        "import contextlib, tok_server.cli\nwith contextlib.suppress(SystemExit): tok_server.cli.main(['--help'])",
        ("torch", "triton", "transformers"),
    ),
    "an engine's process": ("import tok_core.engine", ("torch", "triton", "transformers")),
    "a manager's process": ("import tok_core.replicas.processes.manager_process", ("torch", "triton", "transformers")),
}


@pytest.mark.parametrize("case", LIGHT)
def test_light_processes_import_no_heavy_modules(case: str) -> None:
    statement, heavy = LIGHT[case]
    report = f"{statement}\nimport sys; print('loaded:', *(m for m in {heavy} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded:"

"""Rerun tests of Triton kernels on the CPU, in a process of their own in which Triton interprets kernels.

Triton reads TRITON_INTERPRET when a kernel is defined, so that a process interprets either all kernels or none. A
module of such tests has one test that calls `rerun(__file__)`. The processes are forks of one that has imported torch,
Triton and the kernels, which takes longer than the tests of a small file.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import select
import subprocess
import sys
import tempfile
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from support.patience import PATIENCE

TESTS = Path(__file__).resolve().parents[1]

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

# Parameters of a fixture: the devices on which this process can run kernels.
DEVICES = ["cpu"] if INTERPRETING else [pytest.param("cuda", marks=pytest.mark.gpu)]

# The interpreter converts arrays of one element to loop bounds, which NumPy deprecates.
_ITS_OWN = "ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"
# Pytest would rewrite assertions of plugins; those that are already imported have none.
_IMPORTED = "ignore:Module already imported so cannot be rewritten"

# Pytest plugins of other packages, which take longer to load than the tests of a small file.
_NOT_NEEDED = ("xdist", "langsmith_plugin", "schemathesis", "anyio")

outside = pytest.mark.skipif(INTERPRETING, reason="is what started this process")
"""Marks the test that calls `rerun`."""


def _patch_at_once() -> None:
    """Look the interpreter's builtins up once instead of at each function call, which takes a third of its time."""
    from triton.runtime import interpreter  # type: ignore[import-untyped]

    names: dict[int, list[str]] = {}  # builtins of each Triton module and class, by its id

    def patch(package: Any, builder: Any, scope: Any) -> None:
        if id(package) not in names:
            members = inspect.getmembers(package)
            names[id(package)] = [name for name, member in members if interpreter.tl.core.is_builtin(member)]
        for name in names[id(package)]:
            member = getattr(package, name)
            if not interpreter.tl.core.is_builtin(member):
                return  # an outer function has patched all of them already
            interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch


def _patch_once() -> None:
    """Skip functions called by a kernel: Triton patches its modules again at each call, a seventh of the time."""
    from triton.runtime import interpreter

    patch, is_builtin = interpreter._patch_lang, interpreter.tl.core.is_builtin
    modules: dict[int, list[Any]] = {}  # Triton's modules that a function sees, by the id of its globals

    def patch_unless_patched(fn: Any) -> Any:
        if id(fn.__globals__) not in modules:
            known = (interpreter.tl, interpreter.tl.core)
            modules[id(fn.__globals__)] = [one for one in fn.__globals__.values() if any(one is each for each in known)]
        for module in modules[id(fn.__globals__)]:
            if is_builtin(module.load) or is_builtin(module.tensor.__add__):
                return patch(fn)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_unless_patched


def _share_shapes() -> None:
    """Build Triton's objects for a shape once, and not anew for each tensor and type, a quarter of the time."""
    from triton.language import core  # type: ignore[import-untyped]

    # The cache maps a shape to `shape` and `numel` of its types, to those of its tensors, and to its text.
    known: dict[tuple[int, ...], tuple[Any, Any, Any, Any, str]] = {}
    begin, scalar = core.block_type.__init__, (core.tuple([]), core.constexpr(1))

    def init_type(block: Any, element: Any, shape: Any) -> None:
        found = known.get(tuple(size.value if isinstance(size, core.constexpr) else size for size in shape))
        if found is None:
            begin(block, element, shape)
            sizes = block.shape.values
            of_tensor = core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(block.numel)
            known[tuple(sizes)] = block.shape, block.numel, *of_tensor, str(block.shape)
        else:
            block.element_ty = element
            block.shape, block.numel, _, _, text = found
            block.name = f"<{text}, {element}>"

    def init_tensor(tensor: Any, handle: Any, kind: Any) -> None:
        tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
        tensor.shape, tensor.numel = known[tuple(kind.shape.values)][2:4] if kind.is_block() else scalar

    core.block_type.__init__, core.tensor.__init__ = init_type, init_tensor


def _check_no_overflows() -> None:
    """Turn off the overflow check of integer sums, which compiled kernels lack and which takes half the time."""
    from triton.runtime import interpreter

    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


def _look_types_up() -> None:
    """Cache the NumPy dtype of each Triton dtype, since the interpreter builds a table of all at each look-up."""
    from triton.runtime import interpreter

    find, found = interpreter._get_np_dtype, {}

    def look_up(dtype: Any) -> Any:
        scalar = dtype.scalar
        if scalar.name not in found:
            found[scalar.name] = find(scalar)
        return found[scalar.name]

    interpreter._get_np_dtype = look_up


if INTERPRETING:
    _patch_at_once()
    _patch_once()
    _share_shapes()
    _check_no_overflows()
    _look_types_up()


def rerun(module: str, timeout: float = 3 * PATIENCE) -> None:
    """Run the tests of the file `module` in an interpreting process; fail with its output."""
    without = [word for plugin in ("cacheprovider", *_NOT_NEEDED) for word in ("-p", f"no:{plugin}")]
    # Processes that share a base directory delete each other's old directories while they list it, which warns.
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "output")
        own = ("--basetemp", f"{folder}/tests")
        arguments = ["-q", *without, *own, "-m", "not gpu", "-W", _ITS_OWN, "-W", _IMPORTED, module]
        status = _fork_server().run(arguments, output, timeout)
        if status:
            pytest.fail(f"under the interpreter, with status {status}:\n{output.read_text()}", pytrace=False)


class _ForkServer:
    """A process that interprets kernels and runs pytest in forks of itself."""

    def __init__(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        environment["TRITON_INTERPRET"] = "1"
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS), environment.get("PYTHONPATH")]))
        command = [sys.executable, "-c", "from support.interpreted import serve_forks; serve_forks()"]
        self._process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def run(self, arguments: list[str], output: Path, timeout: float) -> int:
        """Return the exit status of pytest with these arguments, whose output goes to a file."""
        requests, statuses = self._process.stdin, self._process.stdout
        assert requests is not None
        assert statuses is not None
        requests.write(json.dumps([arguments, str(output)]).encode() + b"\n")
        requests.flush()
        assert select.select([statuses], [], [], timeout)[0], f"{arguments[-1]} did not end within {timeout:g} s"
        return int(statuses.readline() or -1)


@cache
def _fork_server() -> _ForkServer:
    return _ForkServer()


def serve_forks() -> None:
    """For each line of stdin, arguments and the path of an output, run pytest in a fork; print its exit status."""
    for name in ("tok_core.engine.core", "tok_kernels.backends.triton"):
        import_module(name)
    torch.use_deterministic_algorithms(False)  # imports torch's compiler
    for line in sys.stdin:
        arguments, output = json.loads(line)
        child = os.fork()
        if child == 0:
            descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            status = int(pytest.main(arguments))
            sys.stdout.flush()
            os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)

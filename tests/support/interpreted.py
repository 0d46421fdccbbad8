"""Rerun tests of Triton kernels on the CPU, in a process of their own in which Triton interprets kernels.

Triton reads TRITON_INTERPRET when a kernel is defined, so that a process interprets either all kernels or none. A
module of such tests has one test that calls `rerun(__file__)`.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import subprocess
import sys
import tempfile
from typing import Any

import pytest

from support.patience import PATIENCE

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

# Parameters of a fixture: the devices on which this process can run kernels.
DEVICES = ["cpu"] if INTERPRETING else [pytest.param("cuda", marks=pytest.mark.gpu)]

# The interpreter converts arrays of one element to loop bounds, which NumPy deprecates.
_ITS_OWN = "ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"

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
    _check_no_overflows()
    _look_types_up()


def rerun(module: str, timeout: float = 3 * PATIENCE) -> None:
    """Run the tests of the file `module` in an interpreting process; fail with its output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["TRITON_INTERPRET"] = "1"
    without = [word for plugin in ("cacheprovider", *_NOT_NEEDED) for word in ("-p", f"no:{plugin}")]
    # Processes that share a base directory delete each other's old directories while they list it, which warns.
    with tempfile.TemporaryDirectory() as folder:
        own = ("--basetemp", f"{folder}/tests")
        command = [sys.executable, "-m", "pytest", "-q", *without, *own, "-m", "not gpu", "-W", _ITS_OWN, module]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    if ended.returncode:
        pytest.fail(f"under the interpreter:\n{ended.stdout}{ended.stderr}", pytrace=False)

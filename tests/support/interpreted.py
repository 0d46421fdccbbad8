"""Tests of Triton kernels on the CPU run in a process of their own, in which Triton interprets kernels.

Triton looks at TRITON_INTERPRET when a kernel is defined, so that one process either interprets all kernels or
none. A module of such tests holds one test that calls `rerun(__file__)`.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import subprocess
import sys
from typing import Any

import pytest

from support.patience import PATIENCE

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

# Where this process can run kernels: parameters for a fixture.
DEVICES = ["cpu"] if INTERPRETING else [pytest.param("cuda", marks=pytest.mark.gpu)]

# The interpreter takes a loop's bounds from arrays of one element, which NumPy is about to forbid.
_ITS_OWN = "ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"

# Plugins that come with packages of other tests, and take longer to load than a small file's tests.
_NOT_NEEDED = ("xdist", "langsmith_plugin", "schemathesis", "anyio")

outside = pytest.mark.skipif(INTERPRETING, reason="is what started this process")
"""Marks the test that calls `rerun`."""


def _patch_at_once() -> None:
    """Let the interpreter look its builtins up once, not at each call of a function: a third of all its time."""
    from triton.runtime import interpreter  # type: ignore[import-untyped]

    names: dict[int, list[str]] = {}  # of each of Triton's modules and classes, by its id: the builtins

    def patch(package: Any, builder: Any, scope: Any) -> None:
        if id(package) not in names:
            members = inspect.getmembers(package)
            names[id(package)] = [name for name, member in members if interpreter.tl.core.is_builtin(member)]
        for name in names[id(package)]:
            member = getattr(package, name)
            if not interpreter.tl.core.is_builtin(member):
                return  # all have been patched together, by an outer function
            interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch


def _check_no_overflows() -> None:
    """Turn off the interpreter's check of each integer sum: compiled kernels have none, and it took half the time."""
    from triton.runtime import interpreter

    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


def _look_types_up() -> None:
    """Keep the NumPy dtype of each Triton dtype: the interpreter makes a table of all of them at each look-up."""
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
    """Runs the tests of the file `module` in an interpreting process; fails with that process's output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["TRITON_INTERPRET"] = "1"
    without = [word for plugin in ("cacheprovider", *_NOT_NEEDED) for word in ("-p", f"no:{plugin}")]
    command = [sys.executable, "-m", "pytest", "-q", *without, "-m", "not gpu", "-W", _ITS_OWN, module]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    if ended.returncode:
        pytest.fail(f"under the interpreter:\n{ended.stdout}{ended.stderr}", pytrace=False)

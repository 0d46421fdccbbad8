"""Tests of Triton kernels on the CPU run in a process of their own, in which Triton interprets kernels.

Triton looks at TRITON_INTERPRET when a kernel is defined, so that one process either interprets all kernels or
none. A module of such tests holds one test that calls `rerun(__file__)`.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

# Where this process can run kernels: parameters for a fixture.
DEVICES = ["cpu"] if INTERPRETING else [pytest.param("cuda", marks=pytest.mark.gpu)]

# The interpreter takes a loop's bounds from arrays of one element, which NumPy is about to forbid.
_ITS_OWN = "ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"

# Plugins that come with packages of other tests, and take longer to load than a small file's tests.
_NOT_NEEDED = ("xdist", "langsmith_plugin", "schemathesis", "anyio")

outside = pytest.mark.skipif(INTERPRETING, reason="is what started this process")
"""Marks the test that calls `rerun`."""


def rerun(module: str, timeout: float = 300.0) -> None:
    """Runs the tests of the file `module` in an interpreting process; fails with that process's output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["TRITON_INTERPRET"] = "1"
    without = [word for plugin in ("cacheprovider", *_NOT_NEEDED) for word in ("-p", f"no:{plugin}")]
    command = [sys.executable, "-m", "pytest", "-q", *without, "-m", "not gpu", "-W", _ITS_OWN, module]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    if ended.returncode:
        pytest.fail(f"under the interpreter:\n{ended.stdout}{ended.stderr}", pytrace=False)

"""Run uv in tests: offline from its cache, and online only if that fails."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from support.workspace import ROOT, uv

PYTHON = os.environ.get("UV_PYTHON", sys.executable)
"""The interpreter of new environments: a path, or a version such as 3.13."""


def own_environment() -> dict[str, str]:
    """Return this process's environment without the variables that lead to the workspace's Python.

    With UV_PYTHON, `uv pip install` would install into that Python's environment instead of the one in its folder.
    """
    to_workspace = {"PYTHONPATH", "VIRTUAL_ENV", "UV_PYTHON", "UV_PROJECT_ENVIRONMENT"}
    return {name: value for name, value in os.environ.items() if name not in to_workspace}


def run_offline_first(
    command: list[str], *, cwd: Path = ROOT, variables: Mapping[str, str] = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    """Run a command that calls uv, at most twice, and return the last run. `variables`: additional environment."""
    for offline in ("1", "0"):
        path = f"{Path(uv()).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**own_environment(), "PATH": path, "UV_OFFLINE": offline, **variables}
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
        if done.returncode == 0:
            break
    return done


def run_uv(*arguments: str | Path, cwd: Path = ROOT) -> str:
    """Run uv, which must succeed, and return its output."""
    done = run_offline_first([uv(), *map(str, arguments)], cwd=cwd)
    assert done.returncode == 0, f"{arguments}\n{done.stderr}"
    return done.stdout

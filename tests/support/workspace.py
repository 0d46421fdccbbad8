"""Find the root, packages and files of the workspace, and uv."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PACKAGES = ("tok-client", "tok-core", "tok-kernels", "tok-server")

PYTHONS = ("3.11", "3.12", "3.13")
"""Versions of Python under which the wheels are tested: `uv run nox -s pythons`."""

_NOT_OURS = {".git", ".venv", ".nox", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", "__pycache__"}


def sources(package: str) -> list[Path]:
    """Return the Python files that `package` installs."""
    return sorted((ROOT / "packages" / package / "src").rglob("*.py"))


def git(*arguments: str) -> str | None:
    """Return git's output about this checkout; None if this is no checkout, or git fails."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        return None
    # Accept a checkout that another user owns, such as a mounted volume: these commands only read.
    command = ["git", "-c", "safe.directory=*", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None


def files() -> list[Path]:
    """Return every tracked or unignored file; outside a checkout, every file outside the folders of tools."""
    listed = git("ls-files", "--cached", "--others", "--exclude-standard", "-z")
    found = (ROOT / name for name in listed.split("\0") if name) if listed is not None else _walk()
    return sorted(path for path in found if path.is_file())


def uv() -> str:
    """Return the path of the uv that runs this process, or of uv on PATH."""
    found = os.environ.get("UV") or shutil.which("uv")
    if found is None:
        raise FileNotFoundError("uv is not on PATH; install it with: python3 -m pip install uv")
    return found


def _walk() -> Iterator[Path]:
    for folder, subfolders, names in os.walk(ROOT):
        subfolders[:] = [name for name in subfolders if name not in _NOT_OURS]
        yield from (Path(folder, name) for name in names)

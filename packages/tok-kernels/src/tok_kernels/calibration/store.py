"""Store calibration results on disk, one file per combination of device, shape, candidates and versions."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import tok_kernels
from tok_kernels.attention.interface import AttentionShape
from tok_kernels.calibration.candidates import Candidate
from tok_kernels.calibration.choice import Choice

_PACKAGES = ("torch", "triton", "flashinfer-python", "tok-kernels")

Key = dict[str, object]


def cache_directory() -> Path:
    """Return the default directory of stored choices: `tok/kernels` in the user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tok" / "kernels"


def choice_key(shape: AttentionShape, device: torch.device, candidates: Sequence[Candidate]) -> Key:
    """Return the key of a choice: all that it depends on, as JSON values."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "shape": shape.as_json(),
        "candidates": [f"{one.phase} {one.name}" for one in candidates],
        "versions": versions(),
        "kernels": sources_digest(),
    }


def read(directory: Path, key: Key) -> Choice | None:
    """Return the choice stored under `key`; None if the file is missing, invalid, or has another key."""
    try:
        stored = json.loads(_file(directory, key).read_text(encoding="utf-8"))
        return Choice.from_json(stored["choice"]) if stored["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):  # invalid JSON and invalid UTF-8 raise ValueErrors
        return None


def write(directory: Path, key: Key, choice: Choice) -> None:
    """Store the choice atomically: readers see either the old or the new file. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    file = _file(directory, key)
    unfinished = file.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    unfinished.write_text(json.dumps({"key": key, "choice": choice.as_json()}, indent=1), encoding="utf-8")
    unfinished.replace(file)


def _file(directory: Path, key: Key) -> Path:
    text = json.dumps(key, sort_keys=True)
    return directory / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def versions() -> dict[str, str]:
    """Return the versions of the packages on which kernels depend; "none" for one that is not installed."""
    return {name: _version(name) for name in _PACKAGES}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


@cache
def sources_digest() -> str:
    """Return a hash of this package's sources, which may change while its version stays."""
    digest = hashlib.sha256()
    for file in sorted(Path(tok_kernels.__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()

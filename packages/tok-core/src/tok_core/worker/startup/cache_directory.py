"""Keep compiled kernels and the calibration of attention kernels in the directory `EngineConfig.cache_dir`.

Each combination of GPU, driver and package versions has its own subdirectory, so that kernels compiled for another
combination are never read:

    <cache_dir>/<hash of the combination>/triton/          Triton's cache
                                          flashinfer/      FlashInfer's modules
                                          kernels/         calibration of attention kernels
                                          manifest.json    the combination, once an engine has started
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import torch

from tok_core.config import EngineConfig
from tok_core.errors import InvalidField
from tok_core.runtime import MANIFEST, ScratchDirectory

log = logging.getLogger("tok_core")

TRITON_CACHE_MANAGER = "tok_kernels.movable_cache:MovableCache"

_copies: list[ScratchDirectory] = []  # kept until the process ends, which removes them


class CacheDirectory:
    """Subdirectory of `cache_dir` for one device, its driver and the installed packages.

    path  the subdirectory, or a writable copy; None: `cache_dir` is not set or cannot be used, and each library uses
          its default directory
    """

    def __init__(self, directory: Path | None, key: Mapping[str, str]) -> None:
        self.path: Path | None = None
        self._key = dict(key)
        if directory is None:
            return
        path = directory / hashlib.sha256(json.dumps(self._key, sort_keys=True).encode()).hexdigest()[:16]
        try:
            if not path.exists():
                self._log_mismatch(directory)
            self.path = self._make_writable(path)
        except (OSError, ValueError) as error:  # a manifest may be no JSON
            log.warning("cache_dir is ignored: %s", error)

    @classmethod
    def of(cls, config: EngineConfig, device: torch.device) -> CacheDirectory:
        """Return the subdirectory of `config.cache_dir` for the device, and make this process use it.

        Raises InvalidField for a CPU, for which no kernel is compiled.
        """
        if config.cache_dir is None:
            return cls(None, {})
        if device.type != "cuda":
            raise InvalidField("cache_dir", config.cache_dir, f"only on a GPU (no kernel is compiled on {device.type})")
        cache = cls(Path(config.cache_dir).expanduser().absolute(), cache_key(device))
        cache.use()
        return cache

    @property
    def calibration(self) -> Path | None:
        """Return the directory that stores which attention kernels are fastest; None: the default."""
        return None if self.path is None else self.path / "kernels"

    def use(self) -> None:
        """Set environment variables so that Triton and FlashInfer use the subdirectory, also in child processes."""
        if self.path is None:
            return
        os.environ["TRITON_CACHE_DIR"] = str(self.path / "triton")
        os.environ["TRITON_CACHE_MANAGER"] = TRITON_CACHE_MANAGER
        os.environ["FLASHINFER_WORKSPACE_BASE"] = str(self.path / "flashinfer")
        if (self.path / MANIFEST).exists():
            from tok_kernels.attention.flashinfer.wrappers import load_built_modules

            load_built_modules()

    def write_manifest(self) -> None:
        """Write the manifest, which says that the subdirectory is complete. Call this once the worker has warmed up."""
        if self.path is None:
            return
        unfinished = self.path / f"{MANIFEST}.{os.getpid()}"
        unfinished.write_text(json.dumps(self._key, indent=1), encoding="utf-8")
        unfinished.replace(self.path / MANIFEST)

    def _make_writable(self, path: Path) -> Path:
        """Return the directory `path`, created if it is missing, or a temporary copy of it if it is read-only."""
        if path.exists() and not os.access(path, os.W_OK):
            copy = ScratchDirectory("kernels")
            _copies.append(copy)
            return Path(shutil.copytree(path, Path(copy.name) / path.name))
        path.mkdir(parents=True, exist_ok=True)
        return path

    def _log_mismatch(self, directory: Path) -> None:
        """Log how this device and its software differ from those of a complete subdirectory, if there is one."""
        for file in sorted(directory.glob(f"*/{MANIFEST}")):
            other = json.loads(file.read_text(encoding="utf-8"))
            differences = [
                f"{name} {other.get(name)}, not {own}" for name, own in self._key.items() if other.get(name) != own
            ]
            log.warning("cache_dir %s has kernels for %s: kernels are compiled", directory, ", ".join(differences))
            return


def cache_key(device: torch.device) -> dict[str, str]:
    """Return the versions and device properties that compiled kernels and their calibration depend on, by name."""
    from tok_kernels.calibration.store import versions

    return {
        "device": torch.cuda.get_device_name(device),
        "capability": "{}.{}".format(*torch.cuda.get_device_capability(device)),
        "driver": f"CUDA {_driver_version()}",
        "python": str(sysconfig.get_config_var("EXT_SUFFIX")),
        **versions(),
    }


def _driver_version() -> str:
    """Return the newest version of CUDA that the installed driver supports, such as "13.0"."""
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return f"{version.value // 1000}.{version.value % 1000 // 10}"

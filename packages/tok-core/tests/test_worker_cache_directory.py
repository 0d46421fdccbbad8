"""A cache directory has a subdirectory for each combination of GPU, driver and versions; a read-only one is copied."""

from __future__ import annotations

import ctypes
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tok_core import EngineConfig, InvalidField
from tok_core.runtime import MANIFEST
from tok_core.worker.startup import cache_directory
from tok_core.worker.startup.cache_directory import CacheDirectory

H200 = {"device": "NVIDIA H200", "driver": "CUDA 13.0", "torch": "2.11.0"}
H100 = {"device": "NVIDIA H100", "driver": "CUDA 12.4", "torch": "2.11.0"}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRITON_CACHE_DIR", "TRITON_CACHE_MANAGER", "FLASHINFER_WORKSPACE_BASE"):
        monkeypatch.setenv(name, "")  # restored after the test


def filled(directory: Path, key: dict[str, str]) -> CacheDirectory:
    cache = CacheDirectory(directory, key)
    assert cache.path is not None
    (cache.path / "triton").mkdir()
    (cache.path / "triton" / "kernel").write_text("code", encoding="utf-8")
    cache.write_manifest()
    return cache


def test_each_gpu_and_version_has_its_own_subdirectory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "kernels"
    first = filled(directory, H200)
    assert first.path is not None
    assert json.loads((first.path / MANIFEST).read_text(encoding="utf-8")) == H200
    assert first.calibration == first.path / "kernels"
    assert CacheDirectory(directory, dict(H200)).path == first.path
    assert caplog.messages == []
    other = CacheDirectory(directory, H100)
    assert other.path is not None
    assert other.path != first.path
    assert not (other.path / MANIFEST).exists()
    (line,) = caplog.messages
    assert line == (
        f"cache_dir {directory} has kernels for device NVIDIA H200, not NVIDIA H100, driver CUDA 13.0, not CUDA 12.4: "
        "kernels are compiled"
    )


def test_libraries_use_the_subdirectory_and_its_built_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from tok_kernels.attention.flashinfer import wrappers

    monkeypatch.setattr(wrappers, "_load_built", False)
    cache = CacheDirectory(tmp_path, H200)
    cache.use()
    assert os.environ["TRITON_CACHE_DIR"] == f"{cache.path}/triton"
    assert os.environ["FLASHINFER_WORKSPACE_BASE"] == f"{cache.path}/flashinfer"
    assert os.environ["TRITON_CACHE_MANAGER"] == "tok_kernels.movable_cache:MovableCache"
    assert not wrappers._load_built
    cache.write_manifest()
    cache.use()
    assert wrappers._load_built


def test_read_only_subdirectory_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = filled(tmp_path, H200)
    monkeypatch.setattr(cache_directory, "_copies", [])
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
        second = CacheDirectory(tmp_path, H200)
    assert first.path is not None
    assert second.path is not None
    assert tmp_path not in second.path.parents
    assert (second.path / "triton" / "kernel").read_text(encoding="utf-8") == "code"
    assert (second.path / MANIFEST).exists()


@pytest.mark.parametrize("content", [None, "no JSON"])
def test_directory_that_cannot_be_used_is_ignored_with_one_line(
    tmp_path: Path, content: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "kernels"
    if content is None:
        directory.write_text("a file", encoding="utf-8")
    else:
        (directory / "part").mkdir(parents=True)
        (directory / "part" / MANIFEST).write_text(content, encoding="utf-8")
    cache = CacheDirectory(directory, H200)
    cache.use()
    cache.write_manifest()
    assert cache.path is cache.calibration is None
    assert os.environ["TRITON_CACHE_DIR"] == ""
    (line,) = caplog.messages
    assert line.startswith("cache_dir is ignored: ")


def test_cache_directory_is_optional_and_refused_on_a_cpu(tmp_path: Path) -> None:
    config = EngineConfig(model="any", cache_dir=str(tmp_path))
    with pytest.raises(InvalidField, match=r"cache_dir .* only on a GPU"):
        CacheDirectory.of(config, torch.device("cpu"))
    assert CacheDirectory.of(EngineConfig(model="any"), torch.device("cpu")).path is None
    for wrong in ("", 3):
        with pytest.raises(InvalidField, match="cache_dir"):
            EngineConfig(model="any", cache_dir=wrong)  # type: ignore[arg-type]


def test_key_names_gpu_driver_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def get_version(version: Any) -> None:
        version._obj.value = 12080

    libraries = {"libcuda.so.1": SimpleNamespace(cuDriverGetVersion=get_version)}
    monkeypatch.setattr(ctypes, "CDLL", libraries.__getitem__)
    key = cache_directory.cache_key(torch.device("cuda", 0))
    assert key["driver"] == "CUDA 12.8"
    assert (key["device"], key["capability"]) == ("NVIDIA H200", "9.0")
    assert {"torch", "triton", "flashinfer-python", "tok-kernels", "python"} <= key.keys()

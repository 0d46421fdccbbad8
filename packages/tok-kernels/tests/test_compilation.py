"""Kernels that a process builds are listed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton  # type: ignore[import-untyped]
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
from triton.runtime.jit import JITFunction  # type: ignore[import-untyped]

from tok_kernels.compilation import kernel_builds
from tok_kernels.norm_rope_kv.triton_norm import rms_norm


@pytest.fixture
def compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Compile launches for compute capability 9.0 in place of running them; return the cache's directory."""
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: -2,  # no other test keeps loaded kernels under this number
        get_current_stream=lambda device: 0,
    )
    run = JITFunction.run
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(
        JITFunction, "run", lambda kernel, *args, warmup, **options: run(kernel, *args, warmup=True, **options)
    )
    return tmp_path


def normalise(size: int) -> None:
    x = torch.empty((4, size), dtype=torch.bfloat16, device="meta")
    rms_norm(x, torch.empty(size, dtype=torch.bfloat16, device="meta"), 1e-5)


def forget_loaded() -> None:
    from tok_kernels.norm_rope_kv.triton_norm import _rms_norm_kernel

    _rms_norm_kernel.device_caches.pop(-2, None)


def test_builds_say_whether_a_kernel_was_compiled_or_loaded(compiling: Path) -> None:
    builds = kernel_builds()
    before = len(builds)
    normalise(512)
    normalise(512)
    forget_loaded()
    normalise(512)
    compiled, loaded = builds[before:]
    assert compiled.startswith("_rms_norm_kernel (compiled, ")
    assert loaded.startswith("_rms_norm_kernel (loaded, ")
    assert kernel_builds() is builds

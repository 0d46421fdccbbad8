"""Kernels that a process builds are listed, and recorded variants are compiled in parallel for later launches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton  # type: ignore[import-untyped]
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
from triton.runtime.jit import JITFunction  # type: ignore[import-untyped]

from tok_kernels.attention.flashinfer import wrappers
from tok_kernels.compilation import Variant, compile_variants, hash_kernel, hash_kernels, kernel_builds, record
from tok_kernels.norm_rope_kv.triton_norm import rms_norm

FORKS = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


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


def functions_of_kernels() -> list[JITFunction]:
    hash_kernels()
    modules = [module for name, module in sorted(sys.modules.items()) if name.startswith("tok_kernels.")]
    found = {id(one): one for module in modules for one in vars(module).values() if isinstance(one, JITFunction)}
    return list(found.values())


def keys_in_order(functions: Sequence[JITFunction], compute: Callable[[JITFunction], object]) -> dict[int, str]:
    for function in functions:
        function.hash, function.used_global_vals = None, {}
    for function in functions:
        compute(function)
    return {id(function): function.cache_key for function in functions}


def test_keys_of_kernels_do_not_depend_on_the_order_of_computing_them() -> None:
    functions = functions_of_kernels()
    assert len(functions) > 50
    forth, back = (keys_in_order(order, hash_kernel) for order in (functions, functions[::-1]))
    assert forth == back
    # Constants of one name that differ would be ordered by their modules' addresses.
    for function in functions:
        values = [(name, str(value)) for (name, _), (value, _) in function.used_global_vals.items()]
        assert len({name for name, _ in values}) == len(set(values)), function.fn.__name__


def test_triton_alone_computes_other_keys_in_another_order() -> None:
    functions = functions_of_kernels()
    forth, back = (keys_in_order(order, lambda one: one.cache_key) for order in (functions, functions[::-1]))
    keys_in_order(functions, hash_kernel)  # for the tests that follow
    assert forth != back, "hash_kernels is no longer needed"


@FORKS
def test_recorded_variants_are_compiled_by_processes_and_then_loaded(compiling: Path) -> None:
    with record(90) as variants:
        for size in (2000, 2000, 4000):
            normalise(size)
    assert [name for name, _ in variants] == ["tok_kernels.norm_rope_kv.triton_norm._rms_norm_kernel"] * 2
    assert list(compiling.iterdir()) == []  # nothing was compiled
    assert compile_variants(list(variants.values()), 2, launchers=False) == []
    builds = kernel_builds()
    before = len(builds)
    for size in (2000, 4000, 8000):
        normalise(size)
    assert [build.partition(",")[0] for build in builds[before:]] == [
        *["_rms_norm_kernel (loaded"] * 2,
        "_rms_norm_kernel (compiled",
    ]


@FORKS
def test_a_variant_that_fails_to_compile_is_named_and_others_compile(compiling: Path) -> None:
    with record(90) as variants:
        normalise(96)
    (variant,) = variants.values()
    error = compile_variants([Variant(variant.kernel, ("too", "few")), variant], 1, launchers=False)
    (line,) = error
    assert line.startswith("tok_kernels.norm_rope_kv.triton_norm._rms_norm_kernel: TypeError: ")
    before = len(kernel_builds())
    normalise(96)
    assert kernel_builds()[before].startswith("_rms_norm_kernel (loaded, ")


def test_compiled_kernels_are_loaded_from_a_directory_that_was_moved(
    compiling: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_MANAGER", "tok_kernels.movable_cache:MovableCache")
    builds = kernel_builds()
    normalise(48)
    moved = compiling.rename(compiling.parent / f"{compiling.name}-moved")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(moved))
    forget_loaded()
    normalise(48)
    normalise(24)
    assert [build.partition(",")[0] for build in builds[-3:]] == [
        "_rms_norm_kernel (compiled",
        "_rms_norm_kernel (loaded",
        "_rms_norm_kernel (compiled",
    ]


@pytest.mark.parametrize("built_ahead", [False, True])
def test_flashinfer_loads_built_modules_as_they_are_if_asked_to(
    tmp_path: Path, built_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = pytest.importorskip("flashinfer.jit.env")
    ahead = tmp_path / "ahead"
    if built_ahead:
        ahead.mkdir()
    monkeypatch.setattr(environment, "FLASHINFER_AOT_DIR", ahead)
    monkeypatch.setattr(environment, "FLASHINFER_JIT_DIR", tmp_path / "built")
    monkeypatch.setattr(wrappers, "_load_built", False)
    wrappers.flashinfer()
    assert ahead == environment.FLASHINFER_AOT_DIR
    wrappers.load_built_modules()
    wrappers.flashinfer()
    assert (ahead if built_ahead else tmp_path / "built") == environment.FLASHINFER_AOT_DIR

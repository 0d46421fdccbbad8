"""Compile Triton kernels ahead of their first launch, in parallel, and list those that this process builds.

`record` notes the variants that wrappers launch on meta tensors: a variant is a kernel for the types, alignments,
constants and options of a launch. `compile_variants` compiles them in processes of their own, which leaves them in
Triton's cache on disk. A later launch of a variant loads it from there.
"""
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

_NO_DEVICE = -1  # Triton keeps loaded kernels by device; no real device has this number

_builds: list[str] | None = None


def kernel_builds() -> list[str]:
    """Return the list to which each kernel is appended when it was built, such as "rope_kernel (compiled, 0.81 s)".

    All calls return the same list. It stays empty without Triton.
    """
    global _builds
    if _builds is None:
        _builds = []
        if find_spec("triton") is not None:
            _listen(_builds)
    return _builds


def _listen(builds: list[str]) -> None:
    compilation: Any = import_module("triton.knobs").compilation
    before = compilation.listener

    def listen(*, src: Any, times: Any, cache_hit: bool, **others: Any) -> None:
        builds.append(f"{src.name} ({'loaded' if cache_hit else 'compiled'}, {times.total / 1e6:.2f} s)")
        if before is not None:
            before(src=src, times=times, cache_hit=cache_hit, **others)

    compilation.listener = listen


def hash_kernels() -> None:
    """Compute the keys of all kernels in Triton's cache on disk; each process calls this before its first launch.

    Triton 3.6 leaves a function's constants out of the key of its caller if it has not met the function before. Keys
    then depend on the order of launches, and a process does not find what another one compiled. So callees come first.
    """
    from triton.runtime.jit import JITFunction

    import_module("tok_kernels.backends.triton")
    loaded = [module for name, module in sorted(sys.modules.items()) if name.startswith("tok_kernels.")]
    for function in [one for module in loaded for one in vars(module).values() if isinstance(one, JITFunction)]:
        hash_kernel(function)


def hash_kernel(function: Any) -> None:
    """Compute the key of a kernel or of a function that kernels call, after those of its callees."""
    if getattr(function, "hash", None) is None:
        called = (function.fn.__globals__.get(name) for name in function.fn.__code__.co_names)
        for callee in called:
            if isinstance(callee, type(function)):
                hash_kernel(callee)
        function.cache_key  # noqa: B018  # computes the key


class Variant(NamedTuple):
    """A kernel and the arguments of `JITFunction._do_compile` that compile it."""

    kernel: Any
    arguments: tuple[Any, ...]

    @property
    def name(self) -> str:
        """Return the kernel's name with its module."""
        return f"{self.kernel.fn.__module__}.{self.kernel.fn.__name__}"

    def compile(self, *, launcher: bool) -> None:
        """Compile the kernel, and with `launcher` the C code that launches it, unless Triton's cache has them."""
        compiled = self.kernel._do_compile(*self.arguments)
        if launcher:
            from triton.backends.nvidia.driver import CudaLauncher

            CudaLauncher(compiled.src, compiled.metadata)


@contextmanager
def record(capability: int) -> Iterator[dict[tuple[str, str], Variant]]:
    """Record the variants that are launched within this context, by kernel and key, in place of launching them.

    capability  compute capability of the GPU to compile for, such as 90

    All of this process's launches are recorded and none happens, so a process that computes must not call this.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    hash_kernels()
    variants: dict[tuple[str, str], Variant] = {}

    def note(kernel: Any, *arguments: Any) -> None:
        variant = Variant(kernel, arguments)
        variants.setdefault((variant.name, arguments[0]), variant)

    target = GPUTarget("cuda", capability, 32)
    compile_now, active = JITFunction._do_compile, driver._active
    JITFunction._do_compile = note
    driver._active = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: _NO_DEVICE,
        get_current_stream=lambda device: 0,
    )
    try:
        yield variants
    finally:
        JITFunction._do_compile, driver._active = compile_now, active


def compile_variants(variants: Sequence[Variant], processes: int, *, launchers: bool = True) -> list[str]:
    """Compile the variants in up to `processes` forked processes; return the errors, one line each.

    launchers  compile Triton's launcher in C of each variant, too, which needs the CUDA driver's library

    The calling process must run no other Python thread. Each child takes variants from a pipe until none is left.
    """
    from triton.runtime.cache import triton_key

    triton_key()  # hashes Triton's library, and is remembered: once here, not once in each child
    numbers, filled = os.pipe()
    errors, failed = os.pipe()
    os.write(filled, b"".join(number.to_bytes(2, "little") for number in range(len(variants))))
    os.close(filled)
    children = []
    for _ in range(min(processes, len(variants))):
        child = os.fork()
        if child == 0:
            _compile_rest(variants, numbers, failed, launchers)
        children.append(child)
    os.close(numbers)
    os.close(failed)
    with os.fdopen(errors, encoding="utf-8") as lines:
        found = lines.read().splitlines()
    statuses = [os.waitpid(child, 0)[1] for child in children]
    return [*found, *(f"a compiling process ended with status {status}" for status in statuses if status)]


def _compile_rest(variants: Sequence[Variant], numbers: int, failed: int, launchers: bool) -> NoReturn:
    """Compile, in a child, the variants whose numbers are left in the pipe; write errors as lines."""
    while number := os.read(numbers, 2):
        variant = variants[int.from_bytes(number, "little")]
        try:
            variant.compile(launcher=launchers)
        # A compiler may raise anything; the launch will raise it again.
        except Exception as error:
            text = " ".join(f"{variant.name}: {type(error).__name__}: {error}".split())
            os.write(failed, f"{text[:1000]}\n".encode())
    os._exit(0)

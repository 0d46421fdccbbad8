"""Compile Triton kernels ahead of their first launch, in parallel, and list the kernels that this process builds.

A variant is a kernel specialised for the argument types, alignments, constants and options of a launch. `record`
collects the variants that a process launches on meta tensors. `compile_variants` compiles them in child processes,
which fill Triton's cache on disk. A later launch of a variant loads it from that cache.
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

_NO_DEVICE = -1  # Triton keeps loaded kernels by device index; no real device has this one
_MAX_ERROR_CHARACTERS = 1000  # of a line that reports a failed compilation; the pipe writes such lines atomically

_builds: list[str] | None = None


def kernel_builds() -> list[str]:
    """Return the list of kernels that this process has built so far, such as "rope_kernel (compiled, 0.81 s)".

    All calls return the same list, to which Triton's builds are appended. It stays empty without Triton.
    """
    global _builds
    if _builds is None:
        _builds = []
        if find_spec("triton") is not None:
            _append_builds_to(_builds)
    return _builds


def _append_builds_to(builds: list[str]) -> None:
    """Install a listener of Triton's compilations, in front of the one that is installed."""
    compilation: Any = import_module("triton.knobs").compilation
    previous_listener = compilation.listener

    def listen(*, src: Any, times: Any, cache_hit: bool, **options: Any) -> None:
        builds.append(f"{src.name} ({'loaded' if cache_hit else 'compiled'}, {times.total / 1e6:.2f} s)")
        if previous_listener is not None:
            previous_listener(src=src, times=times, cache_hit=cache_hit, **options)

    compilation.listener = listen


def hash_kernels() -> None:
    """Compute the cache keys of all kernels of this package; each process calls this before its first launch.

    Triton 3.6 leaves a callee's global constants out of its caller's key, unless the callee's key was computed before.
    Keys would thus depend on the order of launches, and a process would miss kernels that another one compiled. Here
    the keys of callees are always computed first.
    """
    from triton.runtime.jit import JITFunction

    import_module("tok_kernels.backends.triton")
    modules = [module for name, module in sorted(sys.modules.items()) if name.startswith("tok_kernels.")]
    for function in [value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)]:
        hash_kernel(function)


def hash_kernel(function: Any) -> None:
    """Compute the cache key of a JIT function, after those of the functions that it calls."""
    if getattr(function, "hash", None) is None:
        for callee in [function.fn.__globals__.get(name) for name in function.fn.__code__.co_names]:
            if isinstance(callee, type(function)):
                hash_kernel(callee)
        function.cache_key  # noqa: B018  # computes the key


class Variant(NamedTuple):
    """A kernel and the arguments of `JITFunction._do_compile` that compile it."""

    kernel: Any
    arguments: tuple[Any, ...]

    @property
    def name(self) -> str:
        """The kernel's name with its module."""
        return f"{self.kernel.fn.__module__}.{self.kernel.fn.__name__}"

    def compile(self, *, launcher: bool) -> None:
        """Compile the kernel, unless Triton's cache has it; with `launcher`, also the C stub that launches it."""
        compiled = self.kernel._do_compile(*self.arguments)
        if launcher:
            from triton.backends.nvidia.driver import CudaLauncher

            CudaLauncher(compiled.src, compiled.metadata)


@contextmanager
def record(capability: int) -> Iterator[dict[tuple[str, str], Variant]]:
    """Record the variants that are launched within this context, by kernel name and key, instead of launching them.

    capability  compute capability of the GPU to compile for, such as 90

    No kernel of this process is launched within the context, so a process that computes must not enter it.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    hash_kernels()
    variants: dict[tuple[str, str], Variant] = {}

    def record_variant(kernel: Any, *arguments: Any) -> None:
        variant = Variant(kernel, arguments)
        variants.setdefault((variant.name, arguments[0]), variant)

    target = GPUTarget("cuda", capability, 32)
    do_compile, active_driver = JITFunction._do_compile, driver._active
    JITFunction._do_compile = record_variant
    driver._active = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: _NO_DEVICE,
        get_current_stream=lambda device: 0,
    )
    try:
        yield variants
    finally:
        JITFunction._do_compile, driver._active = do_compile, active_driver


def compile_variants(variants: Sequence[Variant], processes: int, *, launchers: bool = True) -> list[str]:
    """Compile the variants in up to `processes` forked processes; return the errors, one line each.

    launchers  also compile each variant's launcher in C, which needs the CUDA driver's library

    The calling process must run no other Python thread. Children take indices of variants from a pipe until it is
    empty.
    """
    from triton.runtime.cache import triton_key

    triton_key()  # hashes Triton's sources; children inherit the cached result
    index_reader, index_writer = os.pipe()
    error_reader, error_writer = os.pipe()
    os.write(index_writer, b"".join(index.to_bytes(2, "little") for index in range(len(variants))))
    os.close(index_writer)
    children = []
    for _ in range(min(processes, len(variants))):
        child = os.fork()
        if child == 0:
            _compile_remaining(variants, index_reader, error_writer, launchers)
        children.append(child)
    os.close(index_reader)
    os.close(error_writer)
    with os.fdopen(error_reader, encoding="utf-8") as lines:
        errors = lines.read().splitlines()
    statuses = [os.waitpid(child, 0)[1] for child in children]
    return [*errors, *(f"a compiling process ended with status {status}" for status in statuses if status)]


def _compile_remaining(variants: Sequence[Variant], index_reader: int, error_writer: int, launchers: bool) -> NoReturn:
    """Compile, in a child process, variants whose indices it reads from the pipe; write errors as lines."""
    while index := os.read(index_reader, 2):
        variant = variants[int.from_bytes(index, "little")]
        try:
            variant.compile(launcher=launchers)
        # A compiler may raise any exception; the later launch raises it again.
        except Exception as error:
            text = " ".join(f"{variant.name}: {type(error).__name__}: {error}".split())
            os.write(error_writer, f"{text[:_MAX_ERROR_CHARACTERS]}\n".encode())
    os._exit(0)

"""Compile the Triton kernels that a worker's startup launches, in parallel processes, before it launches them.

1. The worker sends a `CompileRequest` to a compiling process. On a first start, that process has started together with
   the worker, and imports torch at the same time.
2. The compiling process builds the model on the device "meta" and launches all steps of the startup there. Nothing is
   computed, but the kernel variants are recorded.
3. It compiles the variants in a pool of processes, and writes a marker file to Triton's cache. The marker says that the
   cache has the kernels of a startup with this configuration, so that later startups skip all this.
4. The worker, which has set up its device meanwhile, loads the kernels from Triton's cache. Kernels that are missing
   nevertheless are compiled at their first launch.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import subprocess
import sys
import time
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec
import torch

from tok_core.config import EngineConfig
from tok_core.models import build
from tok_core.quantization import read_quantization
from tok_core.runtime import START_MARKER, start_compiler
from tok_core.worker.cuda_graphs import graph_sizes
from tok_core.worker.layer_kinds import different_layers_only
from tok_core.worker.runner import Runner
from tok_core.worker.startup.resolve import (
    choose_cache_dtype,
    choose_dtype,
    mask_words,
    resolve_model_config,
    resolve_pack_rows,
    resolve_step_sizes,
)
from tok_core.worker.startup.warmup import draft_steps_of, steps_of
from tok_core.worker.state import WorkerState
from tok_kernels.compilation import compile_variants, hash_kernels, kernel_builds, record
from tok_kernels.launch_config import override_for_card

if TYPE_CHECKING:
    from tok_kernels import Backend
    from tok_kernels.compilation import Variant

log = logging.getLogger("tok_core")

HOPPER = 9  # major compute capability of the GPUs whose kernels can be predicted on the device "meta"
CACHE_VARIABLES = "TRITON_CACHE_DIR", "TRITON_CACHE_MANAGER"  # set by `CacheDirectory.use`
MAX_PROCESSES = 16  # compile at the same time
MAX_WAIT_SECONDS = 300.0  # after this time the worker compiles by itself
# Fields of EngineConfig that decide, with the model's own files, which kernels a startup launches. Numbers of slots and
# tokens are left out: they change few kernels (none of the 48 of Llama-3.2-1B from 256 slots on, 4 for 16 slots), which
# the warm-up compiles itself.
KERNEL_FIELDS = (
    *("dtype", "backend", "quantization", "logprobs_mode", "kv_cache_dtype", "page_size", "cuda_graphs"),
    *("prefix_groups", "batch_invariant", "load_format", "speculate", "draft"),
)


class CompileRequest(msgspec.Struct, frozen=True):
    """Message to the compiling process: compile the kernels of a startup with `config`, then write `marker`.

    card         CUDA's name of the GPU; `tok_kernels.launch_config` has launch configurations for some
    capability   compute capability of the GPU, such as 90
    marker       path of the marker file
    environment  variables by which Triton finds its cache
    """

    config: EngineConfig
    card: str
    capability: int
    marker: str
    environment: dict[str, str] = {}


class CompileReport(msgspec.Struct, frozen=True):
    """Message from the compiling process.

    variants  number of kernel variants of the startup
    seconds   time from the request to their compilation
    errors    one for each variant that failed, or a single one if the variants could not be found
    """

    variants: int
    seconds: float
    errors: list[str]


class Precompilation:
    """The worker's side: request the compilation from a compiling process, then `wait` for it.

    Nothing is requested if the cache has all kernels, or if they cannot be predicted: that is implemented for replicas
    with a single worker on a Hopper GPU. A given `compiler` is then ended. As a context manager, this ends the
    compiling process if the body raises: nobody waits for its report then.
    """

    def __init__(
        self,
        config: EngineConfig,
        device: torch.device,
        workers: int,
        compiler: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        request = self._request(config, device, workers)
        if request is not None:
            self._send(request, compiler)
        elif compiler is not None:
            _kill(compiler)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is not None and self._process is not None:
            _kill(self._process)
            self._process = None

    @staticmethod
    def _request(config: EngineConfig, device: torch.device, workers: int) -> CompileRequest | None:
        if device.type != "cuda" or config.backend == "reference" or find_spec("triton") is None:
            return None
        kernel_builds()  # from here on, kernels built in this process are listed
        hash_kernels()  # makes keys of Triton's cache the same in both processes
        major, minor = torch.cuda.get_device_capability(device)
        if workers > 1 or major != HOPPER:
            return None
        card, capability = torch.cuda.get_device_name(device), 10 * major + minor
        marker = marker_path(config, card, capability)
        environment = {name: os.environ[name] for name in CACHE_VARIABLES if name in os.environ}
        return None if marker.exists() else CompileRequest(config, card, capability, str(marker), environment)

    def _send(self, request: CompileRequest, compiler: subprocess.Popen[bytes] | None) -> None:
        process = compiler
        try:
            process = process or start_compiler()
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(request))
            process.stdin.close()
            process.stdin = None  # `communicate` fails on a closed stream
            self._process = process
        except OSError as error:
            if process is not None:
                _kill(process)
            log.warning("kernels are compiled one by one: the compiling process cannot be started (%s)", error)

    def wait(self) -> None:
        """Wait until the kernels are compiled. After a failure, which is logged, they are compiled at first launch."""
        if self._process is None:
            return
        if find_spec("flashinfer") is not None:
            _import_flashinfer()
        process, self._process = self._process, None
        try:
            output, _ = process.communicate(timeout=MAX_WAIT_SECONDS)
            report = msgspec.json.decode(output.rpartition(b"\n")[2], type=CompileReport)
        except (subprocess.TimeoutExpired, msgspec.DecodeError) as error:
            _kill(process)
            log.warning("kernels are compiled one by one: the compiling process failed (%s)", error)
            return
        if report.errors:
            more = f" and {len(report.errors) - 1} more" if len(report.errors) > 1 else ""
            log.warning("kernels are compiled at their first launch: %s%s", report.errors[0], more)
        log.debug("start: %d kernels compiled in %.1f s", report.variants, report.seconds)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process. Do not wait for its children, which may hold its output open until they have compiled."""
    process.kill()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError):  # a request that the process has not read
                stream.close()
    process.wait()


def _import_flashinfer() -> None:
    """Import FlashInfer, for calibration, while this process is idle. Calibration reports a failed import."""
    from tok_kernels.attention.flashinfer.wrappers import flashinfer

    with suppress(Exception):
        flashinfer()


def log_compiled() -> None:
    """Log at level debug which kernels this process has compiled itself."""
    compiled = [build for build in kernel_builds() if "(compiled" in build]
    log.debug("start: %d kernels compiled one by one: %s", len(compiled), ", ".join(compiled))


def marker_path(config: EngineConfig, card: str, capability: int) -> Path:
    """Return the path of the marker file in Triton's cache for startups with this configuration, of any size."""
    from triton import knobs  # type: ignore[import-untyped]

    from tok_kernels.calibration.store import sources_digest, versions

    path = Path(config.model)
    key = {
        "fields": {name: getattr(config, name) for name in KERNEL_FIELDS},
        "model": (path / "config.json").read_text(encoding="utf-8"),
        "guided": (path / "tokenizer.json").is_file(),
        "card": card,
        "capability": capability,
        "versions": versions(),
        "kernels": sources_digest(),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return Path(knobs.cache.dir) / f"{START_MARKER}{digest[:24]}"


def main() -> None:
    """Run the compiling process: read a CompileRequest from standard input, and write a CompileReport."""
    logging.disable()  # the worker logs the same lines
    import_module(
        "torch._dynamo"
    )  # operations on meta tensors import it, which takes seconds: before the request comes
    data = sys.stdin.buffer.read()
    if not data:  # the worker needs no kernel compiled, or has ended
        return
    began = time.monotonic()
    request = msgspec.json.decode(data, type=CompileRequest)
    os.environ.update(request.environment)
    try:
        report = _compile(request, began)
    except Exception as error:  # the worker raises the same error, if the configuration is the cause
        report = CompileReport(0, time.monotonic() - began, [f"{type(error).__name__}: {error}"])
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(report))  # libraries may have printed something before


def _compile(request: CompileRequest, began: float) -> CompileReport:
    override_for_card(request.card)
    variants = startup_variants(request.config, request.capability)
    marker = Path(request.marker)
    marker.parent.mkdir(parents=True, exist_ok=True)
    # Several replicas may start at the same time: the first to take the lock compiles, and the others wait for it.
    with open(marker.parent / "tok-start.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        errors = []
        if not marker.exists():
            errors = compile_variants(variants, min(MAX_PROCESSES, len(os.sched_getaffinity(0))))
        if not errors:
            marker.touch()
    return CompileReport(len(variants), time.monotonic() - began, errors)


def startup_variants(config: EngineConfig, capability: int) -> list[Variant]:
    """Return the kernel variants that a startup launches on a GPU, the longest source first: it compiles longest."""
    with record(capability) as variants:
        launch_startup_steps(config)
    return sorted(variants.values(), key=lambda variant: -len(variant.kernel.src))


def launch_startup_steps(config: EngineConfig) -> None:
    """Launch the steps of a startup on the device "meta"."""
    runner, path = meta_runner(config), Path(config.model)
    sizes = resolve_step_sizes(config, "cuda")
    steps = steps_of(runner, sizes.max_step_tokens, mask_words(runner.model.config, path))
    steps += draft_steps_of(runner, sizes.max_step_tokens)
    with different_layers_only(runner.model, runner.state):
        for step in steps:
            runner.reset()
            runner.launch(step)
        if config.cuda_graphs:
            runner.graphs.launch_eagerly(graph_sizes(sizes.slots))


def meta_runner(config: EngineConfig) -> Runner:
    """Return a runner on the device "meta", whose launches compute nothing.

    Its KV cache has a single page, since the number of pages changes no kernel. Its page table covers `max_model_len`,
    or the model's maximum length.
    """
    path, meta = Path(config.model), torch.device("meta")
    model_config = resolve_model_config(config, path)
    dtype = choose_dtype(config.dtype, torch.device("cuda"))
    quantization = read_quantization(path, config.quantization)
    cache_dtype = choose_cache_dtype(config.kv_cache_dtype, dtype, quantization)
    backend = _triton_backend(config)
    model = build(model_config, backend, meta, dtype, quantization=quantization)
    scales = None
    if cache_dtype == torch.float8_e4m3fn and config.kv_cache_dtype != "fp8_unscaled":
        scales = torch.ones((model_config.num_layers, 2, model_config.num_kv_heads), device=meta)
    state = WorkerState(
        *(model_config, meta, cache_dtype),
        slots=resolve_step_sizes(config, "cuda").slots,
        num_pages=1,
        page_size=config.page_size,
        pages_per_slot=-(-(config.max_model_len or model_config.max_positions) // config.page_size),
        scales=scales,
        processed_logprobs=config.logprobs_mode == "processed_logprobs",
        max_draft_tokens=0 if config.draft else config.max_draft_tokens,
    )
    max_pack_rows = resolve_pack_rows(config, model_config, backend)
    return Runner(model, backend, state, prefix_groups=config.prefix_groups, max_pack_rows=max_pack_rows)


def _triton_backend(config: EngineConfig) -> Backend:
    """Return the Triton backend: calibration launches its kernels, even if it then chooses others."""
    from tok_kernels.backends.triton import InvariantTritonBackend, TritonBackend

    return InvariantTritonBackend() if config.batch_invariant else TritonBackend()

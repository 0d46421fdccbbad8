"""Fit a worker into memory: check the model before it is loaded, measure steps, and size the KV cache by what is left.

1. `require_memory` refuses a model whose weights and smallest KV cache do not fit. Nothing is loaded yet.
2. `measure_steps` runs the largest step on the loaded model, and finds up to which size CUDA graphs pay.
3. `cache_tokens` gives the KV cache the memory that weights, steps and graphs leave.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec
import torch
from msgspec import structs

from tok_core.config import MAX_PARALLEL_DEGREE, EngineConfig, RankCoordinates
from tok_core.errors import EngineError, InvalidField
from tok_core.messages import StepInput
from tok_core.model_config import ModelConfig
from tok_core.models import model_bytes
from tok_core.parallel import ProcessGroups, ShardPlan
from tok_core.quantization import QuantizationConfig, read_quantization
from tok_core.runtime import available_memory, memory_of_siblings
from tok_core.worker.cuda_graphs import graph_sizes, total_graph_rows
from tok_core.worker.draft_model import DRAFT_GRAPH_SIZES
from tok_core.worker.runner import Runner
from tok_core.worker.startup.draft import read_draft
from tok_core.worker.startup.dummy_steps import (
    dummy_drafts,
    dummy_step,
    largest_draft,
    largest_step,
    run_dummy_step,
    with_draft_row,
)
from tok_core.worker.startup.resolve import choose_cache_dtype, dtype_name
from tok_core.worker.state import kv_bytes_per_token

CPU_MEMORY_SHARE = 0.25  # default share of the free memory for the KV cache on a CPU
MAX_CPU_CACHE_TOKENS = 1 << 18  # upper limit of that default
MIN_CACHE_PAGES = 2  # pages of the KV cache: one for a sequence, and the page that no sequence owns
DRIVER_GRAPH_BYTES = 512 << 20  # memory that the driver takes for the CUDA graphs themselves; twice with drafts
GRAPH_TRIALS = 3  # steps of each size that are timed to choose the sizes of CUDA graphs
SLACK = 1.1  # factor on the measured activations, for the allocator's fragmentation

log = logging.getLogger("tok_core")


class MemoryNeeds(msgspec.Struct, frozen=True):
    """Bytes that a worker needs, or several workers together.

    weights    parameters and tables, those of the draft model included. Loading needs no second copy: checkpoint
               files are mapped, not read into memory
    per_token  one position of the KV cache, that of the draft model included
    cache      smallest KV cache that serves
    """

    weights: int
    per_token: int
    cache: int

    @classmethod
    def of(cls, config: EngineConfig, model: ModelConfig, dtype: torch.dtype, worker: RankCoordinates) -> MemoryNeeds:
        """Return the needs of one worker. Raise InvalidField if the model cannot be sharded in this way."""
        local = ShardPlan.of(model, worker).local(model)
        quantization = read_quantization(Path(config.model), config.quantization)
        per_token = kv_bytes_per_token(local, choose_cache_dtype(config.kv_cache_dtype, dtype, quantization))
        tokens = MIN_CACHE_PAGES * config.page_size
        weights = model_bytes(model, dtype, worker, quantization)
        draft = read_draft(config, model, worker)
        if draft is not None:
            weights, per_token = weights + draft.bytes(dtype), per_token + draft.bytes_per_token(dtype)
        return cls(weights, per_token, per_token * min(tokens, config.kv_cache_tokens or tokens))

    @classmethod
    def on_one_gpu(cls, config: EngineConfig, model: ModelConfig) -> MemoryNeeds:
        """Return the needs of a model in bfloat16 on one GPU."""
        return cls.of(config, model, torch.bfloat16, RankCoordinates())

    @property
    def total(self) -> int:
        """Return the bytes of weights and the smallest cache."""
        return self.weights + self.cache


def require_memory(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, peers: ProcessGroups, workers_on_host: int
) -> None:
    """Raise an error if weights and KV cache do not fit into the free memory; allocate nothing.

    On a CPU, the needs of all workers on this host count together. All workers of a replica call this at the same
    point, before they load. Memory held by workers of other replicas, which may have loaded by then, counts as free.
    Raises EngineError if the model does not fit, and InvalidField if `kv_cache_tokens` or `max_model_len` do not fit
    beside it.
    """
    needs = MemoryNeeds.of(config, model, dtype, peers.coordinates)
    if peers.device.type == "cuda":
        free, subject = free_device_memory(config, peers.device), "it needs"
        place = f"of {peers.device} are free (--gpu-memory-fraction)"
    else:
        workers = peers.coordinates.workers
        free, place = available_memory(), "of this host's memory are free"
        if workers_on_host > workers:
            free += memory_of_siblings()
        # This waits for the replica's other workers, so that each reads the free memory before any of them loads.
        sums = peers.all_reduce_sum(needs.weights, needs.per_token, needs.cache)
        needs = MemoryNeeds(*(total * workers_on_host // workers for total in sums))
        subject = "it needs" if workers_on_host == 1 else f"{workers_on_host} workers on this host need"
    if needs.total > free:
        advice = (*_flags_that_fit(config, model, dtype, peers, needs, free), "a smaller model")
        models = config.model if config.draft is None else f"{config.model} with the draft model {config.draft}"
        raise EngineError(
            f"{models} does not fit: {subject} {_readable(needs.weights)} for weights in {dtype_name(dtype)} and "
            f"{_readable(needs.cache)} for the smallest KV cache, but only {_readable(free)} {place}; use "
            f"{' or '.join(advice)}"
        )
    tokens = (free - needs.weights) // needs.per_token
    for field in ("kv_cache_tokens", "max_model_len"):
        if (getattr(config, field) or 0) > tokens:
            raise InvalidField(field, getattr(config, field), f"at most {tokens}, by the memory beside the weights")


def _flags_that_fit(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, peers: ProcessGroups, needs: MemoryNeeds, free: int
) -> Iterator[str]:
    """Yield the flags of which each alone would make the model fit.

    needs  of all workers that share the `free` bytes
    """
    own = MemoryNeeds.of(config, model, dtype, peers.coordinates).total
    alternatives: dict[str, tuple[EngineConfig, torch.dtype]] = {}
    if dtype == torch.float32:
        alternatives["--dtype bfloat16"] = config, torch.bfloat16
    if read_quantization(Path(config.model), config.quantization) == QuantizationConfig():
        alternatives["--quantization fp8"] = structs.replace(config, quantization="fp8"), dtype
    for flag, (smaller_config, smaller_dtype) in alternatives.items():
        total = MemoryNeeds.of(smaller_config, model, smaller_dtype, peers.coordinates).total
        if needs.total * total <= free * own:  # assumes that all workers shrink by this worker's ratio, total / own
            yield flag
    if peers.device.type == "cpu":
        fitting_replicas = free * config.dp // needs.total
        if 1 <= fitting_replicas < config.dp:
            yield f"--dp {fitting_replicas}"
        return
    ranks = 2 * config.tp
    while ranks <= MAX_PARALLEL_DEGREE:
        worker = structs.replace(peers.coordinates, rank=0, ranks=ranks)
        try:
            if MemoryNeeds.of(config, model, dtype, worker).total <= free:
                yield f"--tp {ranks}"
                return
        except InvalidField:  # the model cannot be sharded among so many ranks
            return
        ranks *= 2


def _readable(count: int) -> str:
    """Return a number of bytes in GiB or MiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 1 << 30 else f"{count / 2**20:.1f} MiB"


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Measured memory of a model's steps.

    step_bytes    peak bytes of the largest step, without weights
    graph_rows    decode rows up to which CUDA graphs are worth capturing; 0: no graphs
    graph_bytes   peak bytes of a decode step of that many rows, and bytes that all graphs keep
    drafts        whether there are graphs of steps with drafts, too
    """

    step_bytes: int
    graph_rows: int
    graph_bytes: int
    drafts: bool = False

    @property
    def activations(self) -> int:
        """Return the bytes to keep free beside weights and cache."""
        driver_bytes = DRIVER_GRAPH_BYTES * (1 + self.drafts) if self.graph_rows else 0
        return int((self.step_bytes + self.graph_bytes) * SLACK) + driver_bytes


def measure_steps(runner: Runner, max_step_tokens: int, *, graphs: bool, mask_words: int = 0) -> StepMemory:
    """Measure the largest step, and decode steps of several sizes, on a CUDA device.

    graphs      whether this worker may use CUDA graphs. All workers of a replica call this together and agree on
                `graph_rows`: either all use graphs or none does
    mask_words  words of a grammar mask, see `largest_step`
    """
    step_bytes = _peak_bytes(runner, largest_step(runner.state.slots, max_step_tokens, runner.max_len, mask_words))
    if runner.draft_model is not None:
        step_bytes = max(step_bytes, _peak_bytes(runner, largest_draft(runner, max_step_tokens)))
    if not runner.pipeline.peers.all_reduce_min(graphs):
        return StepMemory(step_bytes, graph_rows=0, graph_bytes=0)
    rows, drafts = largest_graph_rows(runner), runner.graphs.have_drafts
    step = structs.replace(dummy_step(decode=rows), max_kv=runner.max_len)  # graphs take any length
    steps = [step, with_draft_row(step)] if drafts and rows > 1 else [step]
    graph_bytes = max(_peak_bytes(runner, step) for step in steps) + _graph_tensor_bytes(runner, rows)
    if runner.draft_model is not None:
        graph_bytes += _peak_bytes(runner, dummy_drafts(min(rows, DRAFT_GRAPH_SIZES[-1]), 0, runner.max_len))
    return StepMemory(step_bytes, rows, graph_bytes, drafts)


def largest_graph_rows(runner: Runner) -> int:
    """Return the largest graph size whose decode step takes the device less than twice the host's launch time.

    Both times are measured in the same launches. Launched kernel by kernel, a small step takes the device as long as
    the host. Compared with launch times of another moment, a host that has become slower would look like a slow device,
    and only the smallest steps would get graphs. Worker 0's times decide; all workers of a replica run the same steps.
    """
    sizes = graph_sizes(runner.state.slots)
    low, high = 0, len(sizes) - 1
    while low < high:
        middle = (low + high + 1) // 2
        step = dummy_step(decode=sizes[middle])
        outputs = [run_dummy_step(runner, step) for _ in range(GRAPH_TRIALS)]
        ratio = median(output.device_seconds / max(output.launch_seconds, 1e-9) for output in outputs)
        launch_bound = runner.pipeline.peers.broadcast_from_first(ratio < 2)
        low, high = (middle, high) if launch_bound else (low, middle - 1)
    log.debug("start: decode steps of up to %d rows replay CUDA graphs", sizes[low])
    return sizes[low]


def _peak_bytes(runner: Runner, step: StepInput) -> int:
    """Return the peak of bytes allocated during the step, beyond those allocated before."""
    device = runner.state.device
    run_dummy_step(runner, step)  # compiles kernels first, whose scratch memory does not count
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run_dummy_step(runner, step)
    return torch.cuda.max_memory_allocated(device) - before


def _graph_tensor_bytes(runner: Runner, rows: int) -> int:
    """Return the bytes that all graphs up to `rows` rows keep: each graph's outputs, and the input that they share.

    A row of the outputs has a hidden state, a token and a log-probability. Where the worker predicts drafts, it also
    has a count, and two rows have a draft with its count.
    """
    hidden_bytes = runner.model.config.hidden_size * runner.model.dtype.itemsize
    draft_tokens = runner.state.max_draft_tokens
    draft_bytes = 4 + (8 * draft_tokens + 4) // 2 if draft_tokens else 0
    total_rows = total_graph_rows(rows, drafts=runner.graphs.have_drafts)
    input_bytes = 0 if runner.pipeline.coordinates.first else rows * hidden_bytes
    return total_rows * (hidden_bytes + 8 + draft_bytes) + input_bytes


def cache_tokens(
    config: EngineConfig,
    bytes_per_token: int,
    table_bytes: int,
    device: torch.device,
    measured: StepMemory | None,
    workers_on_host: int,
) -> int:
    """Return the positions of the KV cache: as configured, else as many as fit into memory.

    bytes_per_token  bytes of one position in the caches of all models
    table_bytes      bytes of the page tables
    measured         memory of steps; required on a CUDA device
    workers_on_host  number of workers that share the host's memory, evenly on a CPU

    Raises EngineError if the memory is too small. `require_memory` has checked a configured number.
    """
    if config.kv_cache_tokens is not None:
        return config.kv_cache_tokens
    if measured is None:
        cache_bytes = int(available_memory() // workers_on_host * CPU_MEMORY_SHARE)
        return max(config.page_size, min(cache_bytes // bytes_per_token, MAX_CPU_CACHE_TOKENS))
    free, needed = free_device_memory(config, device), measured.activations + table_bytes
    cache_bytes = free - needed
    if cache_bytes < bytes_per_token * MIN_CACHE_PAGES * config.page_size:
        raise EngineError(
            f"no memory is left for the KV cache: steps take {needed / 2**30:.1f} GiB, and weights, CUDA and other "
            f"processes leave {free / 2**30:.1f} GiB; raise gpu_memory_fraction, lower max_step_tokens or max_running, "
            "or stop other processes on the device"
        )
    return cache_bytes // bytes_per_token - config.page_size  # minus the page that no sequence owns


def free_device_memory(config: EngineConfig, device: torch.device) -> int:
    """Return the bytes of a CUDA device that may be allocated beside tensors, CUDA itself and other processes.

    `gpu_memory_fraction` limits an engine that sizes its KV cache itself; a configured cache may fill the device.
    """
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    fraction = 1.0 if config.kv_cache_tokens is not None else config.gpu_memory_fraction
    return max(0, int(total * fraction) - others - torch.cuda.memory_allocated(device))

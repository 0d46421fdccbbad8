"""Compute the size of the KV cache from the memory left by the weights, the largest step and the CUDA graphs."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from statistics import median

import torch

from tok_core.config import MAX_DRAFTING, EngineConfig
from tok_core.errors import EngineError
from tok_core.messages import StepInput
from tok_core.runtime import available_memory
from tok_core.worker.cuda_graphs import graph_sizes, total_graph_rows
from tok_core.worker.draft_graphs import DRAFT_GRAPH_SIZES
from tok_core.worker.runner import Runner
from tok_core.worker.startup.dummy_steps import dummy_drafts, dummy_step, run_dummy_step

CPU_MEMORY_SHARE = 0.25  # default share of the free memory for the KV cache on a CPU
MAX_CPU_CACHE_TOKENS = 1 << 18  # upper limit of that default
MIN_CACHE_PAGES = 2  # pages of the KV cache: one for a sequence, and the page that no sequence owns
CHUNK_TOKENS = 512  # length of the prefill chunks in the largest step
GRAPHS_BYTES = 512 << 20  # memory that the driver takes for the CUDA graphs themselves
GRAPH_TRIALS = 3  # steps of each size that are timed to choose the sizes of CUDA graphs
SLACK = 1.1  # factor on the measured activations, for the allocator's fragmentation

log = logging.getLogger("tok_core")


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Measured memory of a model's steps.

    step_bytes    peak bytes of the largest step, without weights
    graph_rows    decode rows up to which CUDA graphs are worth capturing; 0: no graphs
    graph_bytes   peak bytes of a decode step of that many rows, and bytes that all graphs keep
    """

    step_bytes: int
    graph_rows: int
    graph_bytes: int

    @property
    def activations(self) -> int:
        """Return the bytes to keep free beside weights and cache."""
        return int((self.step_bytes + self.graph_bytes) * SLACK) + (GRAPHS_BYTES if self.graph_rows else 0)


def measure(runner: Runner, max_step_tokens: int, *, graphs: bool, words: int = 0) -> StepMemory:
    """Measure the largest step, and decode steps of several sizes, on a CUDA device. `words`: see `largest_step`.

    All workers of a replica call this together and agree on `graph_rows`: either all use graphs or none does.
    """
    step_bytes = _peak(runner, largest_step(runner.state.slots, max_step_tokens, runner.max_len, words))
    if runner.draft_model is not None:
        step_bytes = max(step_bytes, _peak(runner, largest_draft(runner, max_step_tokens)))
    rows = graph_rows(runner) if runner.pipeline.peers.all_reduce_min(graphs) else 0
    graph_bytes = _peak(runner, dummy_step(decode=rows)) + _kept_bytes(runner, rows) if rows else 0
    if rows and runner.draft_model is not None:
        graph_bytes += _peak(runner, dummy_drafts(min(rows, DRAFT_GRAPH_SIZES[-1]), 0, runner.max_len))
    return StepMemory(step_bytes, rows, graph_bytes)


def measured_len(max_positions: int, slots: int, tokens: int) -> int:
    """Return the length that `slots` sequences of the largest step need to have `tokens` together."""
    return min(max_positions, max(CHUNK_TOKENS, -(-tokens // slots)))


def _kept_bytes(runner: Runner, rows: int) -> int:
    """Return the bytes of the graphs' outputs (hidden state, token, log-probability of each row) and of their input."""
    state = runner.model.config.hidden_size * runner.model.dtype.itemsize
    return total_graph_rows(rows) * (state + 8) + (0 if runner.pipeline.coordinates.first else rows * state)


def largest_step(slots: int, tokens: int, max_len: int, words: int = 0) -> StepInput:
    """Return the step with the largest memory: the maximum of prefill tokens and sampled rows, with all options.

    No sequence is longer than `max_len`: the step has fewer than `tokens` if `slots` sequences hold fewer. `words`:
    words of the grammar mask that every sampled row has; 0: there is no guided decoding.
    """
    tokens = min(tokens, slots * max_len)
    chunks = -(-tokens // min(CHUNK_TOKENS, max_len))
    sampling_rows = min(slots, tokens)
    return dummy_step(
        chunks=min(chunks, slots),
        tokens=tokens,
        sampling_rows=sampling_rows,
        filtered=sampling_rows,
        penalised=sampling_rows,
        prompt_outputs=True,
        masked=sampling_rows if words else 0,
        words=words,
    )


def largest_draft(runner: Runner, max_step_tokens: int) -> StepInput:
    """Return the step for which the draft model reads and drafts most."""
    assert runner.draft_model is not None
    longest = min(runner.max_len, runner.draft_model.model.config.max_positions)
    return dummy_drafts(min(runner.state.slots, MAX_DRAFTING), max_step_tokens, longest)


def _peak(runner: Runner, step: StepInput) -> int:
    """Return the peak of bytes allocated during the step, beyond those allocated before."""
    device = runner.state.device
    run_dummy_step(runner, step)  # compiles kernels first, whose scratch memory does not count
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run_dummy_step(runner, step)
    return torch.cuda.max_memory_allocated(device) - before


def graph_rows(runner: Runner) -> int:
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


def cache_tokens(
    config: EngineConfig,
    per_token: int,
    tables: int,
    device: torch.device,
    measured: StepMemory | None,
    workers_on_host: int,
) -> int:
    """Return the positions of the KV cache: as configured, else as many as fit into memory.

    per_token        bytes of a position
    tables           bytes of the page tables
    measured         required on a CUDA device
    workers_on_host  number of workers that share the host's memory, evenly on a CPU

    Raises EngineError if the memory is too small. `require_memory` has checked a configured number.
    """
    if config.kv_cache_tokens is not None:
        return config.kv_cache_tokens
    if measured is None:
        cache_bytes = int(available_memory() // workers_on_host * CPU_MEMORY_SHARE)
        return max(config.page_size, min(cache_bytes // per_token, MAX_CPU_CACHE_TOKENS))
    free, needed = free_device_memory(config, device), measured.activations + tables
    cache_bytes = free - needed
    if cache_bytes < per_token * MIN_CACHE_PAGES * config.page_size:
        raise EngineError(
            f"no memory is left for the KV cache: steps take {needed / 2**30:.1f} GiB, and weights, CUDA and other "
            f"processes leave {free / 2**30:.1f} GiB; raise gpu_memory_fraction, lower max_step_tokens or max_running, "
            "or stop other processes on the device"
        )
    return cache_bytes // per_token - config.page_size  # minus the page that no sequence owns


def free_device_memory(config: EngineConfig, device: torch.device) -> int:
    """Return the bytes of a CUDA device that may be allocated beside tensors, CUDA itself and other processes.

    `gpu_memory_fraction` limits an engine that sizes its KV cache itself; a configured cache may fill the device.
    """
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    fraction = 1.0 if config.kv_cache_tokens is not None else config.gpu_memory_fraction
    return max(0, int(total * fraction) - others - torch.cuda.memory_allocated(device))

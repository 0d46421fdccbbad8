"""Memory: how many positions the KV cache may hold beside the weights, the largest step and the graphs."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

from tok_core.config import EngineConfig
from tok_core.errors import EngineError, InvalidField
from tok_core.messages import StepInput
from tok_core.worker.cuda_graphs import kept_rows, sizes
from tok_core.worker.runner import Runner
from tok_core.worker.startup.dummy_steps import dummy_step, run_dummy_step

CPU_MEMORY_SHARE = 0.25  # of the free memory, for the cache, where nothing else is said
CPU_CACHE_TOKENS = 1 << 18  # and no more than this many positions
CHUNK_TOKENS = 512  # of the prompts in the largest step
GRAPHS_BYTES = 512 << 20  # what the driver keeps for the graphs themselves
SLACK = 1.1  # over the activations measured: what the allocator loses between blocks


@dataclass(frozen=True, slots=True)
class StepMemory:
    """What a model's steps were seen to take.

    step_bytes    of the largest step, without weights
    graph_rows    decode rows up to which a graph is faster to launch than its kernels one by one; 0: none is
    graph_bytes   of a decode step of that many rows, and of what each graph keeps
    """

    step_bytes: int
    graph_rows: int
    graph_bytes: int

    @property
    def activations(self) -> int:
        """Bytes to keep free beside weights and cache."""
        return int((self.step_bytes + self.graph_bytes) * SLACK) + (GRAPHS_BYTES if self.graph_rows else 0)


def measure(runner: Runner, max_step_tokens: int, *, graphs: bool, words: int = 0) -> StepMemory:
    """Runs the largest step, and decode steps of several sizes, on a CUDA device. `words`: see `largest_step`.

    All workers of a replica do so together. They agree on `graph_rows`: none has graphs where one cannot.
    """
    step_bytes = _peak(runner, largest_step(runner.state.slots, max_step_tokens, runner.max_len, words))
    rows = graph_rows(runner) if runner.pipeline.peers.least(graphs) else 0
    graph_bytes = _peak(runner, dummy_step(decode=rows)) + _kept_bytes(runner, rows) if rows else 0
    return StepMemory(step_bytes, rows, graph_bytes)


def measured_len(max_positions: int, slots: int, tokens: int) -> int:
    """Positions that the sequences of the largest step need, if `slots` of them are to have `tokens` together."""
    return min(max_positions, max(CHUNK_TOKENS, -(-tokens // slots)))


def _kept_bytes(runner: Runner, rows: int) -> int:
    """Bytes of the hidden state, token and log-probability of each row of the graphs, and of what they read."""
    state = runner.model.config.hidden_size * runner.model.dtype.itemsize
    return kept_rows(rows) * (state + 8) + (0 if runner.pipeline.place.first else rows * state)


def largest_step(slots: int, tokens: int, max_len: int, words: int = 0) -> StepInput:
    """As many prompt tokens as a step may have, with all that can be asked of them, and as many draws, as costly as
    draws can be.

    No sequence is longer than `max_len`: where `slots` of them hold fewer than `tokens`, so does any step. `words`: of
    a mask; all draws are guided then, 0 where none can be.
    """
    tokens = min(tokens, slots * max_len)
    chunks = -(-tokens // min(CHUNK_TOKENS, max_len))
    draws = min(slots, tokens)
    return dummy_step(
        chunks=min(chunks, slots),
        tokens=tokens,
        draws=draws,
        filtered=draws,
        penalised=draws,
        asks=True,
        masked=draws if words else 0,
        words=words,
    )


def _peak(runner: Runner, step: StepInput) -> int:
    """Bytes allocated at most while the step is carried out, beyond what was allocated before."""
    device = runner.state.device
    run_dummy_step(runner, step)  # once before: kernels are compiled, and their scratch memory is not the step's
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run_dummy_step(runner, step)
    return torch.cuda.max_memory_allocated(device) - before


def graph_rows(runner: Runner) -> int:
    """The largest size at which the host takes as long to launch a decode step as half of its time on the device.

    As the first of a replica's workers sees it: all of them carry out the same steps to find out.
    """
    step = dummy_step(decode=1)
    launch = min(run_dummy_step(runner, step).launch_seconds for _ in range(5))
    found = sizes(runner.state.slots)
    low, high = 0, len(found) - 1
    while low < high:
        middle = (low + high + 1) // 2
        step = dummy_step(decode=found[middle])
        seconds = min(run_dummy_step(runner, step).device_seconds for _ in range(3))
        faster = runner.pipeline.peers.of_first(seconds < 2 * launch)
        low, high = (middle, high) if faster else (low, middle - 1)
    return found[low]


def cache_tokens(
    config: EngineConfig,
    per_token: int,
    tables: int,
    device: torch.device,
    measured: StepMemory | None,
    on_host: int,
) -> int:
    """Positions of the KV cache: as configured, else what the memory leaves.

    `per_token`: bytes of a position; `tables`: bytes of the page tables; `measured` is needed on a CUDA device. Raises
    InvalidField, or EngineError where the memory is too small. A CPU's memory is cut evenly among the workers
    `on_host`.
    """
    per_cpu = psutil.virtual_memory().available // on_host
    if config.kv_cache_tokens is not None:
        # A CPU's memory is promised before it is there; what takes more than is free is killed later.
        free = per_cpu if device.type == "cpu" else None
        if free is not None and config.kv_cache_tokens * per_token > free:
            raise InvalidField(
                "kv_cache_tokens", config.kv_cache_tokens, f"at most {free // per_token}, by free memory"
            )
        return config.kv_cache_tokens
    if measured is None:
        room = int(per_cpu * CPU_MEMORY_SHARE)
        return max(config.page_size, min(room // per_token, CPU_CACHE_TOKENS))
    free, total = torch.cuda.mem_get_info(device)
    weights = torch.cuda.memory_allocated(device)
    others = total - free - torch.cuda.memory_reserved(device)
    needed = weights + measured.activations + tables
    room = int(total * config.gpu_memory_fraction) - others - needed
    if room < per_token * 2 * config.page_size:
        allowed, others_gib, needed_gib = (x / 2**30 for x in (total * config.gpu_memory_fraction, others, needed))
        raise EngineError(
            f"no memory is left for the KV cache: of the {allowed:.1f} GiB that may be used of the device, weights and "
            f"steps take {needed_gib:.1f} GiB, and CUDA and other processes {others_gib:.1f} GiB; raise "
            "gpu_memory_fraction, lower max_step_tokens or max_running, or end what else uses the device"
        )
    return room // per_token - config.page_size  # a page belongs to nobody

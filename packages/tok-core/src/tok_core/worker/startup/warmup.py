"""Warm up: compile, capture and allocate ahead of the first requests."""

from __future__ import annotations

import logging
import time

import torch
from msgspec import structs

from tok_core.messages import MAX_CASCADE_LEVELS, StepInput
from tok_core.worker.cuda_graphs import graph_sizes
from tok_core.worker.draft_graphs import DRAFT_GRAPH_SIZES
from tok_core.worker.layer_kinds import different_layers_only
from tok_core.worker.runner import Runner
from tok_core.worker.sampling import MAX_GATHERED_ROWS
from tok_core.worker.startup.dummy_steps import dummy_drafts, dummy_step, run_dummy_step
from tok_core.worker.startup.gemm_warmup import warm_up_gemms
from tok_core.worker.startup.memory import SLACK, StepMemory, largest_draft, largest_step

LONG_CONTEXT_TOKENS = 4096  # contexts of this length use the kernels for long ones
SHORT_PREFIX_TOKENS = 1024
MAX_ROW_POSITIONS = 1 << 25  # rows × shared positions of a step; bounds its time

log = logging.getLogger("tok_core")


def warm_up(runner: Runner, measured: StepMemory, max_step_tokens: int, words: int = 0) -> None:
    """Run a step of each kind, and capture CUDA graphs, on a CUDA device. `words`: as in `warm_up_steps`."""
    state, sizes = runner.state, graph_sizes(measured.graph_rows) if measured.graph_rows else []
    # Allocate one block and free it: steps then reuse it, and the allocator does not call the driver again.
    torch.empty(int(measured.step_bytes * SLACK), dtype=torch.uint8, device=state.device)
    warm_up_gemms(runner.model, min(max_step_tokens, state.slots * runner.max_len), state.slots)
    began = time.monotonic()
    with different_layers_only(runner.model, state):
        for step in (*steps_of(runner, max_step_tokens, words), *draft_steps_of(runner, max_step_tokens)):
            run_dummy_step(runner, step)
        runner.reset()
        for length in (1, 2):  # the second step records the tokens that another stage sampled in the first
            runner.launch(structs.replace(dummy_step(decode=1), max_kv=length)).output()
        runner.reset()
        runner.graphs.launch(sizes)
        torch.cuda.synchronize(state.device)
    warm = time.monotonic()
    runner.graphs.capture(sizes)
    if runner.draft_model is not None:
        runner.draft_model.capture([size for size in DRAFT_GRAPH_SIZES if size <= measured.graph_rows])
    log.debug(
        "start: a step of each kind: %.1f s; %d CUDA graphs captured in %.1f s",
        *(warm - began, len(runner.graphs), time.monotonic() - warm),
    )


def steps_of(runner: Runner, max_step_tokens: int, words: int) -> list[StepInput]:
    """Return the steps of `warm_up_steps`, without those with prefix groups if the engine has none."""
    state = runner.state
    steps = warm_up_steps(state.slots, max_step_tokens, runner.max_len, state.page_size, words)
    return [step for step in steps if runner.prefix_groups or not step.levels]


def draft_steps_of(runner: Runner, max_step_tokens: int) -> list[StepInput]:
    """Return steps of few and many sequences for which the draft model drafts, with and without a chunk to read."""
    if runner.draft_model is None:
        return []
    largest = largest_draft(runner, max_step_tokens)
    rows = {min(rows, len(largest.decode_slot)) for rows in (1, 16, 300)}
    lengths = {largest.max_kv, min(largest.max_kv, SHORT_PREFIX_TOKENS)}
    chunks = 0, min(2, max_step_tokens)
    return [largest, *(dummy_drafts(count, tokens, end) for count in rows for tokens in chunks for end in lengths)]


def warm_up_steps(slots: int, tokens: int, max_len: int, page_size: int, words: int = 0) -> list[StepInput]:
    """Return a step for each case that launches other kernels.

    The cases are few and many decode rows; no, flat and nested prefix groups; prefill alone and beside decode rows;
    short and long contexts; every sampling option. `words`: words of a grammar mask; 0: no masks.
    """
    pages, max_rows = max_len // 2 // page_size, min(slots, tokens)
    prefix = pages * page_size
    steps = [largest_step(slots, tokens, max_len, words)]
    for rows in {1, min(16, max_rows), min(300, max_rows), max_rows}:
        steps.append(dummy_step(decode=rows))
        # Long enough to count as a long context, but not so long that many rows take seconds to read it.
        shared = min(pages, max(LONG_CONTEXT_TOKENS, MAX_ROW_POSITIONS // rows) // page_size)
        if rows > 1 and shared:
            prefixes = [(levels, shared // levels * levels * page_size) for levels in range(1, MAX_CASCADE_LEVELS + 1)]
            if rows > 3:
                steps.append(dummy_step(decode=rows, groups=1, prefix=shared * page_size))
                # A short prefix of many rows is split, although the rows' own keys are not.
                short = min(pages, SHORT_PREFIX_TOKENS // page_size) * page_size
                steps.append(dummy_step(decode=rows - 1, groups=1, prefix=short, chunks=1, tokens=1))
            steps += [dummy_step(decode=rows, groups=rows // 2, prefix=end, levels=n) for n, end in prefixes if end]
    few = min(8, slots - 1, tokens - 1)
    if few > 0:
        long = min(max_len - few, tokens - few)
        for decode in (0, few):
            steps += [dummy_step(decode=decode, chunks=1, tokens=count) for count in {1, long} if count > 0]
            cached = max(0, max_len - 2 * few)
            chunks = min(few, slots - decode, tokens - decode)
            steps.append(dummy_step(decode=decode, chunks=chunks, tokens=min(few, tokens - decode), cached=cached))
            steps.append(dummy_step(decode=decode, chunks=1, tokens=1, greedy=True))  # sampled without a graph
            steps.append(dummy_step(decode=decode, chunks=1, tokens=1, prompt_outputs=True))
        if few > 1 and prefix:
            steps.append(dummy_step(decode=few, groups=1, prefix=prefix, chunks=1, tokens=1))
    for rows in {1, min(max_rows, MAX_GATHERED_ROWS + 1)}:
        steps += [
            dummy_step(decode=rows, greedy=True),
            dummy_step(decode=rows, top_logprobs=1),
            dummy_step(decode=rows, top_logprobs=20),
            dummy_step(decode=rows, filtered=1),
            dummy_step(decode=rows, filtered=rows),
            dummy_step(decode=rows, penalised=1),
            dummy_step(decode=rows, penalised=1, greedy=True),
            dummy_step(decode=rows, penalised=rows, filtered=rows),
        ]
        if words:
            steps += [dummy_step(decode=rows, masked=masked, words=words) for masked in {1, rows}]
    return steps

"""Warm up a worker before its first request: compile and load kernels, allocate memory, capture CUDA graphs."""

from __future__ import annotations

import logging
import time
from typing import cast

import torch
from msgspec import structs

from tok_core.config import MAX_DRAFT_TOKENS
from tok_core.messages import MAX_CASCADE_LEVELS, StepInput
from tok_core.models import CausalLM, DecoderLayer
from tok_core.parallel import choose_layout
from tok_core.worker.cuda_graphs import graph_sizes
from tok_core.worker.draft_model import DRAFT_GRAPH_SIZES
from tok_core.worker.layer_kinds import different_layers, different_layers_only
from tok_core.worker.runner import Runner
from tok_core.worker.sampling import MAX_GATHERED_ROWS, MAX_SAMPLED_ROWS
from tok_core.worker.startup.dummy_steps import (
    dummy_drafts,
    dummy_step,
    dummy_verify_rows,
    largest_draft,
    largest_step,
    run_dummy_step,
    with_draft_row,
)
from tok_core.worker.startup.memory import SLACK, StepMemory

LONG_PREFIX_TOKENS = 4096  # prefixes of this length use the kernels for long contexts
SHORT_PREFIX_TOKENS = 1024
MAX_ROW_POSITIONS = 1 << 25  # rows × shared positions of a step; bounds the time of the step
MAX_CONSECUTIVE_TOKENS = 64  # up to this number of tokens, the kernels of experts change most often
MAX_DENSE_TOKENS = 2048  # kernels of layers without experts do not change for more tokens
# Numbers of rows for which the GEMMs of a pipeline are warmed up: every one up to MAX_CONSECUTIVE_ROWS, then multiples
MAX_CONSECUTIVE_ROWS = 1024
LAYER_ROW_STEP = 16  # of this for layers,
HEAD_ROW_STEP = 64  # of this for the LM head, which has few kernels,
ODD_ROW_STEP = 64  # and one odd number in each range of this length

log = logging.getLogger("tok_core")


def warm_up(runner: Runner, measured: StepMemory, max_step_tokens: int, mask_words: int = 0) -> None:
    """Run a step of each kind, and capture CUDA graphs, on a CUDA device. `mask_words`: see `warm_up_steps`."""
    state, sizes = runner.state, graph_sizes(measured.graph_rows) if measured.graph_rows else []
    # Allocate one block and free it: steps then reuse it, and the allocator does not call the driver again.
    torch.empty(int(measured.step_bytes * SLACK), dtype=torch.uint8, device=state.device)
    warm_up_gemms(runner.model, min(max_step_tokens, state.slots * runner.max_len), min(state.slots, MAX_SAMPLED_ROWS))
    began = time.monotonic()
    with different_layers_only(runner.model, state):
        for step in (*steps_of(runner, max_step_tokens, mask_words), *draft_steps_of(runner, max_step_tokens)):
            run_dummy_step(runner, step)
        runner.reset()
        for length in (1, 2):  # the second step records the tokens that another stage sampled in the first
            runner.launch(structs.replace(dummy_step(decode=1), max_kv=length)).output()
        runner.reset()
        runner.graphs.launch_eagerly(sizes)
        torch.cuda.synchronize(state.device)
    steps_done = time.monotonic()
    runner.graphs.capture(sizes)
    if runner.draft_model is not None:
        runner.draft_model.capture([size for size in DRAFT_GRAPH_SIZES if size <= measured.graph_rows])
    log.debug(
        "start: a step of each kind: %.1f s; %d CUDA graphs captured in %.1f s",
        *(steps_done - began, len(runner.graphs), time.monotonic() - steps_done),
    )


def steps_of(runner: Runner, max_step_tokens: int, mask_words: int) -> list[StepInput]:
    """Return the `warm_up_steps` of a runner and steps with packs, without prefix groups if the engine has none."""
    state = runner.state
    steps = warm_up_steps(state.slots, max_step_tokens, runner.max_len, state.page_size, mask_words)
    max_tokens = min(max_step_tokens, state.slots - 1 + runner.max_len)
    steps += _token_steps(state.slots, max_tokens, experts=runner.model.config.moe is not None)
    if runner.max_pack_rows > 1:
        rows = min(state.slots, max_step_tokens)
        steps += _pack_steps(rows, runner.max_len, state.page_size)
    return [step for step in steps if runner.prefix_groups or not step.levels]


def draft_steps_of(runner: Runner, max_step_tokens: int) -> list[StepInput]:
    """Return steps with drafts: rows that verify few and many tokens, or all ways in which the draft model is used.

    The draft model drafts for few and for many sequences, with and without chunks to read.
    """
    if runner.state.ngrams is not None:
        rows = min(runner.state.slots, max_step_tokens)
        lengths = {min(tokens, rows - 1, runner.max_len - 1) for tokens in (1, 3, MAX_DRAFT_TOKENS)}
        return [dummy_verify_rows(tokens) for tokens in lengths if tokens > 0]
    if runner.draft_model is None:
        return []
    largest = largest_draft(runner, max_step_tokens)
    row_counts = {min(rows, len(largest.decode_slot)) for rows in (1, 16, 300)}
    max_lens = {largest.max_kv, min(largest.max_kv, SHORT_PREFIX_TOKENS)}
    chunk_tokens = 0, min(2, max_step_tokens)
    return [
        largest,
        *(
            dummy_drafts(rows, tokens, max_len)
            for rows in row_counts
            for tokens in chunk_tokens
            for max_len in max_lens
        ),
    ]


def warm_up_steps(
    slots: int, max_step_tokens: int, max_len: int, page_size: int, mask_words: int = 0
) -> list[StepInput]:
    """Return one step for each case that launches other kernels than the other cases.

    `mask_words` is the size of a grammar mask; 0: there is no guided decoding.
    """
    max_rows = min(slots, max_step_tokens)
    max_prefix_pages = max_len // 2 // page_size
    return [
        largest_step(slots, max_step_tokens, max_len, mask_words),
        *_decode_steps(max_rows, max_prefix_pages, page_size),
        *_long_decode_steps(max_rows, max_len, max_prefix_pages * page_size),
        *_prefill_steps(slots, max_step_tokens, max_len, max_prefix_pages * page_size),
        *_sampling_steps(max_rows, mask_words),
    ]


def _pack_steps(max_rows: int, max_len: int, page_size: int) -> list[StepInput]:
    """Return decode steps in which a row verifies a drafted token."""
    steps = _decode_steps(max_rows, max_len // 2 // page_size, page_size)
    steps += [structs.replace(dummy_step(decode=rows), max_kv=max_len) for rows in {min(2, max_rows), max_rows}]
    return [with_draft_row(step) for step in steps if len(step.decode_slot) > 1]


def _decode_steps(max_rows: int, max_prefix_pages: int, page_size: int) -> list[StepInput]:
    """Return steps of few and many decode rows, without prefix groups and with groups in each number of levels."""
    steps = []
    for rows in {1, min(16, max_rows), min(300, max_rows), max_rows}:
        steps.append(dummy_step(decode=rows))
        # Long enough to count as a long context, but not so long that many rows take seconds to read it.
        pages = min(max_prefix_pages, max(LONG_PREFIX_TOKENS, MAX_ROW_POSITIONS // rows) // page_size)
        if rows == 1 or not pages:
            continue
        if rows > 3:
            steps.append(dummy_step(decode=rows, groups=1, prefix=pages * page_size))
            # A short prefix of many rows is split, although the rows' own keys are not.
            short_prefix = min(max_prefix_pages, SHORT_PREFIX_TOKENS // page_size) * page_size
            steps.append(dummy_step(decode=rows - 1, groups=1, prefix=short_prefix, chunks=1, tokens=1))
        for levels in range(1, MAX_CASCADE_LEVELS + 1):
            prefix = pages // levels * levels * page_size  # whole pages in each level
            if prefix:
                steps.append(dummy_step(decode=rows, groups=rows // 2, prefix=prefix, levels=levels))
    return steps


def _long_decode_steps(max_rows: int, max_len: int, prefix: int) -> list[StepInput]:
    """Return steps of few decode rows of long sequences, without prefix groups and in one group.

    Attention splits the keys of such rows. Which kernel merges the results depends on the number of rows.
    """
    steps = []
    for rows in {1, min(2, max_rows), min(16, max_rows), min(60, max_rows)}:
        steps.append(structs.replace(dummy_step(decode=rows), max_kv=max_len))
        if rows > 1 and prefix:
            steps.append(structs.replace(dummy_step(decode=rows, groups=1, prefix=prefix), max_kv=max_len))
    return steps


def _prefill_steps(slots: int, max_step_tokens: int, max_len: int, prefix: int) -> list[StepInput]:
    """Return steps with prefill chunks, short and long, with short and long contexts, alone and beside decode rows."""
    few = min(8, slots - 1, max_step_tokens - 1)
    if few <= 0:
        return []
    steps = []
    long_chunk = min(max_len - few, max_step_tokens - few)
    for decode in (0, few):
        steps += [dummy_step(decode=decode, chunks=1, tokens=tokens) for tokens in {1, long_chunk} if tokens > 0]
        chunks = min(few, slots - decode, max_step_tokens - decode)
        tokens, cached = min(few, max_step_tokens - decode), max(0, max_len - 2 * few)
        steps += [
            dummy_step(decode=decode, chunks=chunks, tokens=tokens, cached=cached),
            dummy_step(decode=decode, chunks=1, tokens=1, greedy=True),  # sampled without a graph
            dummy_step(decode=decode, chunks=1, tokens=1, prompt_outputs=True),
        ]
    if few > 1 and prefix:
        steps.append(dummy_step(decode=few, groups=1, prefix=prefix, chunks=1, tokens=1))
    return steps


def _token_steps(slots: int, max_tokens: int, *, experts: bool) -> list[StepInput]:
    """Return steps with the numbers of tokens between which linear layers change their kernels.

    As many tokens as slots allow are decode rows, and the rest are a prefill chunk.
    """
    counts = set(graph_sizes(max_tokens if experts else min(MAX_DENSE_TOKENS, max_tokens)))
    if experts:
        counts.update(range(1, min(max_tokens, MAX_CONSECUTIVE_TOKENS) + 1))
    steps = []
    for tokens in sorted(counts):
        decode = tokens if tokens <= slots else slots - 1
        steps.append(dummy_step(decode=decode, chunks=int(tokens > decode), tokens=tokens - decode))
    return steps


def _sampling_steps(max_rows: int, mask_words: int) -> list[StepInput]:
    """Return steps with each sampling option, for one row and for more rows than are sampled at once."""
    steps = []
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
        if mask_words:
            steps += [dummy_step(decode=rows, masked=masked, mask_words=mask_words) for masked in {1, rows}]
    return steps


@torch.inference_mode()
def warm_up_gemms(model: CausalLM, max_tokens: int, max_rows: int) -> None:
    """Load a pipeline stage's GEMM kernels: of layers up to `max_tokens` tokens, of the LM head up to `max_rows` rows.

    cuBLAS chooses a kernel by the number of rows: by their number of tiles, and by whether it is a multiple of eight. A
    kernel is loaded when it is first used, and loading waits until the device is idle. In a pipeline, transfers on the
    device wait for other stages, so that the device is idle only once those have sent their results. Stages would then
    compute one after the other, and lose about a second for each new kernel.

    All workers of a replica call this at the same point. Does nothing without pipeline parallelism.
    """
    if model.shard_plan.coordinates.stages == 1:
        return
    layers = [cast("DecoderLayer", model.model.layers[str(number)]) for number in different_layers(model)]
    device, size = model.cos_sin_LD.device, model.config.hidden_size
    for tokens in row_counts(max_tokens, LAYER_ROW_STEP):
        layout = None if model.tensor is None else choose_layout(model.tensor, tokens)
        for layer in layers:
            layer.run_gemms(torch.zeros((model.stream_rows(tokens), size), dtype=model.dtype, device=device), layout)
    for rows in row_counts(max_rows, HEAD_ROW_STEP) if model.shard_plan.coordinates.last else ():
        model.logits(torch.zeros((rows, size), dtype=model.dtype, device=device))


def row_counts(max_rows: int, step: int) -> list[int]:
    """Return numbers of rows: consecutive ones, then multiples of `step` and some odd ones, and `max_rows`.

    >>> row_counts(1200, 64)[1022:]
    [1023, 1024, 1057, 1088, 1121, 1152, 1185, 1200]
    """
    start = MAX_CONSECUTIVE_ROWS
    further = {*range(start + step, max_rows, step), *range(start + ODD_ROW_STEP // 2 + 1, max_rows, ODD_ROW_STEP)}
    return [*range(1, min(max_rows, start + 1)), *sorted(further), max_rows]

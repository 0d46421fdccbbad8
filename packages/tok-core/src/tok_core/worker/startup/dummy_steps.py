"""Build and run dummy steps, which belong to no request: startup measures the device and warms it up with them.

All sequences of a dummy step use the first page of the KV cache. `WorkerState.reset` removes the sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec import structs

from tok_core.config import MAX_DRAFTING
from tok_core.messages import (
    EMPTY,
    GroupLevel,
    Int32,
    ModelDrafts,
    RequestedPromptOutputs,
    SlotMoves,
    StepInput,
    StepOutput,
    VerifyRows,
    array,
)
from tok_core.sampling_params import MAX_PROMPT_LOGPROBS

if TYPE_CHECKING:
    from tok_core.worker.runner import Runner

LARGEST_STEP_CHUNK_TOKENS = 512  # length of the prefill chunks in the largest step


def run_dummy_step(runner: Runner, step: StepInput) -> StepOutput:
    """Reset the runner, launch the step, and wait for its output."""
    runner.reset()
    return runner.launch(step).output()


def dummy_step(
    *,
    decode: int = 0,
    groups: int = 0,
    prefix: int = 0,
    levels: int = 1,
    chunks: int = 0,
    tokens: int = 0,
    cached: int = 0,
    sampling_rows: int | None = None,
    filtered: int = 0,
    penalised: int = 0,
    top_logprobs: int = 0,
    greedy: bool = False,
    prompt_outputs: bool = False,
    masked: int = 0,
    mask_words: int = 0,
) -> StepInput:
    """Build a step of `decode` rows and of `chunks` prefill chunks.

    groups         prefix groups that divide the decode rows evenly
    prefix         positions that the rows of a group share
    levels         cascade levels of the prefix; in all but the last, one group has all rows
    tokens         prefill tokens of all chunks together
    cached         positions cached before each chunk
    sampling_rows  rows that sample, spread over the sequences; None: one for each sequence
    filtered       number of sampled rows with top-k, top-p and min-p filters, from the first row on
    penalised      number of sampled rows with penalties, from the first row on
    top_logprobs   top log-probabilities of every sampled row; 0: none
    greedy         sample at temperature 0
    prompt_outputs request all prompt outputs for all chunks
    masked         number of rows with a grammar mask of `mask_words` words, which allows every token
    """
    slot = np.arange(decode + chunks, dtype=np.int32)
    chunk_tokens = _even_parts(tokens, chunks)
    group_rows = _even_parts(decode, groups)
    group_start = (np.cumsum(group_rows) - group_rows).astype(np.int32)
    level_len = prefix // levels
    last_level_start = level_len * (levels - 1)
    outer_levels = [
        _group_level(array([0]), array([decode]), start, start + level_len)
        for start in range(0, last_level_start, level_len or 1)
    ]
    rows = np.arange(len(slot) if sampling_rows is None else sampling_rows, dtype=np.int32) % len(slot)
    return StepInput(
        step=0,
        sampled_upto=0,
        new=None,
        page_slot=EMPTY,
        page_index=EMPTY,
        page_id=EMPTY,
        decode_slot=slot[:decode],
        levels=[*outer_levels, _group_level(group_start, group_rows, last_level_start, prefix)] if groups else [],
        prefill_slot=slot[decode:],
        prefill_start=np.full(chunks, cached, np.int32),
        prefill_count=chunk_tokens,
        prefill_token=np.zeros(tokens, np.int32),
        copy_src=EMPTY,
        copy_dst=EMPTY,
        sample_row=rows,
        sample_slot=rows,
        filter_row=np.arange(filtered, dtype=np.int32),
        penalty_row=np.arange(penalised, dtype=np.int32),
        bias_row=EMPTY,
        top_logprobs=top_logprobs,
        all_greedy=greedy,
        max_kv=max(prefix, cached + int(chunk_tokens.max(initial=0)), 1),
        prompts=_all_prompt_outputs(chunk_tokens) if prompt_outputs else None,
        mask_row=np.arange(masked, dtype=np.int32),
        mask_index=np.arange(masked, dtype=np.int32),
        bitmask=np.full((masked, mask_words), -1, np.int32),
        top_row=np.arange(len(rows) if top_logprobs else 0, dtype=np.int32),
    )


def dummy_drafts(rows: int, chunk_tokens: int, max_len: int) -> StepInput:
    """Build a step of `rows` decode rows in which the draft model drafts for each.

    The draft model first reads chunks of `chunk_tokens` together. It then drafts two tokens for each row, or one if
    `max_len` is 1. No sequence is longer than `max_len`.
    """
    step, zeros, passes = dummy_step(decode=rows), np.zeros(rows, np.int32), min(2, max_len)
    chunks = -(-chunk_tokens // max_len)
    step.max_kv = max_len
    step.drafts = ModelDrafts(
        chunk_slot=np.zeros(chunks, np.int32),
        chunk_start=np.zeros(chunks, np.int32),
        chunk_count=_even_parts(chunk_tokens, chunks),
        chunk_token=np.zeros(chunk_tokens, np.int32),
        slot=step.decode_slot,
        position=zeros,
        token=zeros,
        end=zeros + np.int32(passes),
        lent=np.repeat(step.decode_slot[:, None], passes, axis=1),
    )
    return step


def dummy_verify_rows(tokens: int) -> StepInput:
    """Build a step in which decode rows verify `tokens` drafted tokens of one sequence."""
    step = dummy_step(decode=1 + tokens)
    parent, lent = step.decode_slot[:1], step.decode_slot[None, 1:]
    step.max_kv = 1 + tokens
    step.verify_rows = VerifyRows(parent, lent, np.zeros_like(lent))
    step.predict_slot, step.predicted_tokens = parent, tokens
    return step


def with_draft_row(step: StepInput) -> StepInput:
    """Return a step of at least two decode rows so that its second row verifies a drafted token of its first."""
    moves = SlotMoves(slot=array([1]), source=array([0]), length=array([1]), last_token=array([0]))
    return structs.replace(step, moves=moves, max_kv=max(step.max_kv, 2))


def largest_step(slots: int, max_step_tokens: int, max_len: int, mask_words: int = 0) -> StepInput:
    """Build the step that takes the most memory: as many prefill tokens and sampled rows as allowed, with all options.

    No sequence is longer than `max_len`, so the step has fewer than `max_step_tokens` if `slots` sequences hold fewer.
    `mask_words` is the size of the grammar mask of every sampled row; 0: there is no guided decoding.
    """
    tokens = min(max_step_tokens, slots * max_len)
    chunks = -(-tokens // min(LARGEST_STEP_CHUNK_TOKENS, max_len))
    sampling_rows = min(slots, tokens)
    return dummy_step(
        chunks=min(chunks, slots),
        tokens=tokens,
        sampling_rows=sampling_rows,
        filtered=sampling_rows,
        penalised=sampling_rows,
        prompt_outputs=True,
        masked=sampling_rows if mask_words else 0,
        mask_words=mask_words,
    )


def largest_step_len(max_positions: int, slots: int, max_step_tokens: int) -> int:
    """Return the length of sequences with which `slots` of them fill the largest step."""
    return min(max_positions, max(LARGEST_STEP_CHUNK_TOKENS, -(-max_step_tokens // slots)))


def largest_draft(runner: Runner, max_step_tokens: int) -> StepInput:
    """Build the step in which the draft model reads and drafts the most tokens."""
    assert runner.draft_model is not None
    max_len = min(runner.max_len, runner.draft_model.model.config.max_positions)
    return dummy_drafts(min(runner.state.slots, MAX_DRAFTING), max_step_tokens, max_len)


def _even_parts(total: int, parts: int) -> Int32:
    """Return `parts` numbers that differ by at most one and add up to `total`."""
    return np.diff(np.linspace(0, total, parts + 1).astype(np.int32)).astype(np.int32)


def _all_prompt_outputs(chunk_tokens: Int32) -> RequestedPromptOutputs:
    chunk, rows = np.arange(len(chunk_tokens), dtype=np.int32), int(chunk_tokens.sum())
    return RequestedPromptOutputs(
        scored=chunk,
        scored_count=chunk_tokens,
        scored_token=np.zeros(rows, np.int32),
        top_logprobs=MAX_PROMPT_LOGPROBS,
        pooled=chunk,
        pooled_count=chunk_tokens,
    )


def _group_level(start: Int32, count: Int32, kv_start: int, kv_end: int) -> GroupLevel:
    """Return groups of `count` rows from row `start` on; the page table of the first row's slot lists their pages."""
    return GroupLevel(start, count, start, np.full_like(start, kv_start), np.full_like(start, kv_end))

"""Build and run dummy steps of a given shape, to measure and warm up the device. They belong to no request.

Their sequences all use the first page of the KV cache; `WorkerState.reset` removes the sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tok_core.messages import (
    EMPTY,
    GroupLevel,
    Int32,
    ModelDrafts,
    RequestedPromptOutputs,
    StepInput,
    StepOutput,
    array,
)
from tok_core.sampling_params import MAX_PROMPT_LOGPROBS

if TYPE_CHECKING:
    from tok_core.worker.runner import Runner


def run_dummy_step(runner: Runner, step: StepInput) -> StepOutput:
    """Reset the runner, and run a dummy step."""
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
    words: int = 0,
) -> StepInput:
    """Build a step of `decode` rows and of `chunks` prefill chunks.

    groups               prefix groups that divide the decode rows evenly
    prefix               positions that the rows of a group share
    levels               cascade levels of the prefix; in all but the last, one group has all rows
    tokens               prefill tokens of all chunks together
    cached               positions cached before each chunk
    sampling_rows        rows that sample, spread over the sequences; None: one for each sequence
    filtered, penalised  number of sampled rows, from the first on, with filters and with penalties
    prompt_outputs       request all prompt outputs for all chunks
    masked               number of rows with a grammar mask of `words` words, which allows every token
    """
    slot = np.arange(decode + chunks, dtype=np.int32)
    count = np.diff(np.linspace(0, tokens, chunks + 1).astype(np.int32)).astype(np.int32)
    members = np.diff(np.linspace(0, decode, groups + 1).astype(np.int32)).astype(np.int32)
    first = (np.cumsum(members) - members).astype(np.int32)
    length = prefix // levels  # positions per level
    inner = length * (levels - 1)
    outer_levels = [
        _level(array([0]), array([decode]), start, start + length) for start in range(0, inner, length or 1)
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
        levels=[*outer_levels, _level(first, members, inner, prefix)] if groups else [],
        prefill_slot=slot[decode:],
        prefill_start=np.full(chunks, cached, np.int32),
        prefill_count=count,
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
        max_kv=max(prefix, cached + int(count.max(initial=0)), 1),
        prompts=_all_prompt_outputs(count) if prompt_outputs else None,
        mask_row=np.arange(masked, dtype=np.int32),
        mask_of=np.arange(masked, dtype=np.int32),
        mask=np.full((masked, words), -1, np.int32),
        top_row=np.arange(len(rows) if top_logprobs else 0, dtype=np.int32),
    )


def dummy_drafts(rows: int, tokens: int, max_len: int) -> StepInput:
    """Build a step of `rows` decode rows, for each of which the draft model drafts two tokens, or one if that is all.

    Before, the draft model reads chunks of `tokens` together. No sequence is longer than `max_len`.
    """
    step, zeros, passes = dummy_step(decode=rows), np.zeros(rows, np.int32), min(2, max_len)
    chunks = -(-tokens // max_len)
    count = np.diff(np.linspace(0, tokens, chunks + 1).astype(np.int32)).astype(np.int32)
    step.max_kv = max_len
    step.drafts = ModelDrafts(
        chunk_slot=np.zeros(chunks, np.int32),
        chunk_start=np.zeros(chunks, np.int32),
        chunk_count=count,
        chunk_token=np.zeros(tokens, np.int32),
        slot=step.decode_slot,
        position=zeros,
        token=zeros,
        end=zeros + np.int32(passes),
        lent=np.repeat(step.decode_slot[:, None], passes, axis=1),
    )
    return step


def _all_prompt_outputs(count: Int32) -> RequestedPromptOutputs:
    chunk = np.arange(len(count), dtype=np.int32)
    return RequestedPromptOutputs(chunk, count, np.zeros(count.sum(), np.int32), MAX_PROMPT_LOGPROBS, chunk, count)


def _level(first: Int32, members: Int32, start: int, end: int) -> GroupLevel:
    return GroupLevel(first, members, first, np.full_like(first, start), np.full_like(first, end))

"""Measure the error of an 8-bit KV cache without scales, by log-probabilities of the loaded model."""

from __future__ import annotations

import logging

import numpy as np
import torch
from msgspec import structs

from tok_core.messages import EMPTY, PromptValues, RequestedPromptOutputs
from tok_core.models import CausalLM
from tok_core.parallel import Pipeline
from tok_core.worker.runner import Runner
from tok_core.worker.startup.dummy_steps import dummy_step, run_dummy_step
from tok_core.worker.state import WorkerState
from tok_kernels import Backend

log = logging.getLogger("tok_core")

MAX_TOKENS = 256  # scored: enough for a mean, in milliseconds on a GPU


def warn_of_cache_error(
    model: CausalLM, backend: Backend, pipeline: Pipeline, cache_dtype: torch.dtype, page_size: int, max_tokens: int
) -> None:
    """Log how log-probabilities of random tokens differ between caches of `cache_dtype` and of the model's dtype.

    `max_tokens` bounds their number. All workers of a replica call this; rank 0 of the last stage logs.
    """
    rng = np.random.default_rng(0)
    count = min(MAX_TOKENS, max_tokens, model.config.max_positions)
    if count < 2:
        log.warning("the KV cache holds %s without scales; a step is too short to measure what it costs", cache_dtype)
        return
    tokens = rng.integers(0, model.config.vocab_size, count).astype(np.int32)
    exact, found = (_score(model, backend, pipeline, dtype, page_size, tokens) for dtype in (model.dtype, cache_dtype))
    if exact is None or found is None or pipeline.coordinates.rank:
        return
    error = np.abs(found.logprob - exact.logprob)
    log.warning(
        "the KV cache holds %s without scales: log-probabilities of %d random tokens differ by %.2g on average, and by "
        "%.2g at most, from those with a cache of %s; another token is the most likely one in %.1f %% of positions",
        *(_name(cache_dtype), len(error), error.mean(), error.max(), _name(model.dtype)),
        100 * float((found.top_token != exact.top_token).mean()),
    )


def _score(
    model: CausalLM, backend: Backend, pipeline: Pipeline, dtype: torch.dtype, page_size: int, tokens: np.ndarray
) -> PromptValues | None:
    """Return the log-probability of each token but the first, and the top-1 token; None at stages without logits."""
    count = len(tokens)
    pages = np.arange(-(-count // page_size), dtype=np.int32)
    state = WorkerState(
        *(model.local, pipeline.peers.device, dtype),
        slots=1,
        num_pages=len(pages),
        page_size=page_size,
        pages_per_slot=len(pages),
    )
    step = structs.replace(
        dummy_step(chunks=1, tokens=count, greedy=True),
        prefill_token=tokens,
        page_slot=np.zeros_like(pages),
        page_index=pages,
        page_id=pages,
        prompts=RequestedPromptOutputs(
            np.zeros(1, np.int32), np.array([count - 1], np.int32), tokens[1:], 1, EMPTY, EMPTY
        ),
    )
    runner = Runner(model, backend, state, pipeline=pipeline)
    values = run_dummy_step(runner, step).prompts
    runner.reset()
    return values


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

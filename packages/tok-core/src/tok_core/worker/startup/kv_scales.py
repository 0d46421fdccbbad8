"""Choose the scales of an 8-bit KV cache, and log the error that the cache causes, by prompts on the loaded model.

Axes: K key/value heads, D head size.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from tok_core.messages import EMPTY, RequestedPromptOutputs, StepInput
from tok_core.models import CausalLM
from tok_core.parallel import Pipeline
from tok_core.worker.runner import Runner
from tok_core.worker.startup.dummy_steps import dummy_step, run_dummy_step
from tok_core.worker.startup.resolve import dtype_name
from tok_core.worker.state import WorkerState
from tok_kernels import Backend

log = logging.getLogger("tok_core")

MAX_SCORED_TOKENS = 256  # of the prompt that measures the error: enough for a mean, and milliseconds on a GPU
MAX_CALIBRATION_TOKENS = 512  # of the prompt whose keys and values calibrate the scales
FLOAT8_MAX = 448.0
# Minimum ratio of the largest value that the cache can hold to the largest value of the calibration. On texts of the
# demo model, values are up to 2.2 times as large as on random tokens. Factors from 2 to 16 had nearly the same error
# there: float8 rounds relative to a value's size, so headroom costs only the smallest values.
HEADROOM = 4.0


class TrialResult(NamedTuple):
    """Results of a prefill of n tokens.

    kv         cached keys and values, `[layers, 2, pages, page_size, K, D]`
    logprob    float32 `[n − 1]`: log-probabilities of the tokens but the first; empty at stages without logits
    top_token  int32 `[n − 1, 1]`: most likely token in place of each of them
    """

    kv: Tensor
    logprob: np.ndarray
    top_token: np.ndarray


@dataclass(frozen=True, slots=True)
class CacheTrial:
    """Prefills prompts of random tokens, one at a time, on a small KV cache of any dtype.

    All workers of a replica run it together. A prompt of more than `max_step_tokens` is prefilled in several steps.
    """

    model: CausalLM
    backend: Backend
    pipeline: Pipeline
    page_size: int
    max_step_tokens: int

    def random_tokens(self, max_tokens: int, seed: int) -> np.ndarray:
        """Return a prompt of `max_tokens` random tokens, or of the model's maximum length if that is less."""
        config = self.model.config
        count = min(max_tokens, config.max_positions)
        return np.random.default_rng(seed).integers(0, config.vocab_size, count).astype(np.int32)

    def prefill(self, tokens: np.ndarray, dtype: torch.dtype, scales: Tensor | None = None) -> TrialResult:
        """Prefill the tokens on a new cache of `dtype`, with `scales` by head if given, and score each next token."""
        pages = -(-len(tokens) // self.page_size)
        state = WorkerState(
            *(self.model.local, self.pipeline.peers.device, dtype),
            slots=1,
            num_pages=pages,
            page_size=self.page_size,
            pages_per_slot=pages,
            scales=scales,
        )
        runner = Runner(self.model, self.backend, state, pipeline=self.pipeline)
        steps = [self._step(tokens, start, pages) for start in range(0, len(tokens), self.max_step_tokens)]
        values = [step_values for step in steps if (step_values := run_dummy_step(runner, step).prompts) is not None]
        runner.reset()
        return TrialResult(
            kv=state.kv[:, :, :pages],
            logprob=np.concatenate([np.empty(0, np.float32), *(step_values.logprob for step_values in values)]),
            top_token=np.concatenate([np.empty((0, 1), np.int32), *(step_values.top_token for step_values in values)]),
        )

    def _step(self, tokens: np.ndarray, start: int, pages: int) -> StepInput:
        """Return the step that prefills the tokens from `start` on, and scores the tokens after them."""
        size = self.max_step_tokens
        chunk, next_tokens = tokens[start : start + size], tokens[start + 1 : start + 1 + size]
        page = np.arange(pages, dtype=np.int32)
        prompts = RequestedPromptOutputs(
            scored=np.zeros(1, np.int32),
            scored_count=np.array([len(next_tokens)], np.int32),
            scored_token=next_tokens,
            top_logprobs=1,
            pooled=EMPTY,
            pooled_count=EMPTY,
        )
        return structs.replace(
            dummy_step(chunks=1, tokens=len(chunk), cached=start, greedy=True),
            prefill_token=chunk,
            page_slot=np.zeros_like(page),
            page_index=page,
            page_id=page,
            prompts=prompts if len(next_tokens) else None,
        )


def choose_kv_scales(requested: str, trial: CacheTrial, *, dummy: bool) -> tuple[Tensor | None, str]:
    """Return the scales of an 8-bit cache, float32 `[layers, 2, K]`, and a description of their origin.

    The scales are the checkpoint's, if it has any, else calibrated on the model. They are None if `requested` rules
    them out, and for int8, whose scales are computed for each token.

    dummy  the weights are dummy weights: scales are 1, since a trainer's weights will have far larger keys and values
    """
    if requested == "int8":
        return None, "with a scale for each token and head"
    if requested == "fp8_unscaled":
        return None, "without scales"
    stored = trial.model.kv_scales()
    if stored is not None:
        return stored, "with the checkpoint's scales"
    if dummy:
        shape = trial.model.local.num_layers, 2, trial.model.local.num_kv_heads
        return torch.ones(shape, device=trial.pipeline.peers.device), "with scales of 1, for dummy weights"
    tokens = trial.random_tokens(MAX_CALIBRATION_TOKENS, seed=1)
    scales = calibrated_scales(trial.prefill(tokens, trial.model.dtype).kv)
    return scales, f"with scales calibrated on {len(tokens)} random tokens"


def calibrated_scales(kv: Tensor) -> Tensor:
    """Return float8 scales `[layers, 2, K]` for the keys and values of a cache, `[layers, 2, pages, page_size, K, D]`.

    Scales are powers of two, which leave mantissas unchanged. Values within the range of float8 are thus rounded as
    without a scale, and ranks and replicas agree although their sums differ in the last bits. A head with only zeros,
    or with values that are not finite, gets the scale 1.
    """
    min_scale = kv.abs().amax((2, 3, 5)).float().cpu() * (HEADROOM / FLOAT8_MAX)
    scales = torch.ldexp(torch.ones_like(min_scale), torch.frexp(min_scale).exponent)
    usable = (min_scale > 0) & scales.isfinite() & scales.reciprocal().isfinite()
    return torch.where(usable, scales, 1.0).to(kv.device)


def log_cache_error(trial: CacheTrial, cache_dtype: torch.dtype, scales: Tensor | None, origin: str) -> None:
    """Log how log-probabilities of random tokens differ between caches of `cache_dtype` and of the model's dtype.

    All workers of a replica call this; rank 0 of the last stage logs, a warning for a float8 cache without scales.
    """
    tokens, exact_dtype = trial.random_tokens(MAX_SCORED_TOKENS, seed=0), trial.model.dtype
    exact, quantised = trial.prefill(tokens, exact_dtype), trial.prefill(tokens, cache_dtype, scales)
    if not len(exact.logprob) or trial.pipeline.coordinates.rank:
        return
    error = np.abs(quantised.logprob - exact.logprob)
    log.log(
        logging.WARNING if scales is None and cache_dtype.is_floating_point else logging.INFO,
        "the KV cache holds %s %s: log-probabilities of %d random tokens differ by %.2g on average, and by %.2g at "
        "most, from those with a cache of %s; another token is the most likely one in %.1f %% of positions",
        *(dtype_name(cache_dtype), origin, len(error), error.mean(), error.max(), dtype_name(exact_dtype)),
        100 * float((quantised.top_token != exact.top_token).mean()),
    )

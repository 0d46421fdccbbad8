"""Choose the scales of an 8-bit KV cache, and measure the error that the cache causes, on the loaded model.

Axes: K key/value heads.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from tok_core.messages import EMPTY, PromptValues, RequestedPromptOutputs, StepInput
from tok_core.models import CausalLM
from tok_core.parallel import Pipeline
from tok_core.worker.runner import Runner
from tok_core.worker.startup.dummy_steps import dummy_step, run_dummy_step
from tok_core.worker.state import WorkerState
from tok_kernels import Backend

log = logging.getLogger("tok_core")

MAX_SCORED_TOKENS = 256  # enough for a mean, in milliseconds on a GPU
MAX_CALIBRATION_TOKENS = 512
FLOAT8_MAX = 448.0
# Least factor between the largest number that calibration meets and the largest that the cache holds. On texts of the
# demo model, numbers are up to 2.2 times as large as on random tokens. Factors from 2 to 16 had nearly the same error
# there: float8 rounds relative to a number's size, so headroom costs only the smallest numbers.
HEADROOM = 4.0


@dataclass(frozen=True, slots=True)
class CacheTrial:
    """Runner of single prompts of random tokens over caches of any dtype; all workers of a replica call it together.

    max_tokens  maximum tokens of a step. Longer prompts take several steps, so that scales do not depend on it
    """

    model: CausalLM
    backend: Backend
    pipeline: Pipeline
    page_size: int
    max_tokens: int

    def tokens(self, most: int, seed: int) -> np.ndarray:
        """Return random tokens of a prompt: `most`, or as many as the model has positions for."""
        config = self.model.config
        count = min(most, config.max_positions)
        return np.random.default_rng(seed).integers(0, config.vocab_size, count).astype(np.int32)

    def run(
        self, tokens: np.ndarray, dtype: torch.dtype, scales: Tensor | None = None
    ) -> tuple[WorkerState, list[PromptValues]]:
        """Prefill the tokens; return the state, and in parts the log-probability of each token but the first.

        Stages without logits return no parts.
        """
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
        starts = range(0, len(tokens), self.max_tokens)
        found = [run_dummy_step(runner, self._step(tokens, start, pages)).prompts for start in starts]
        runner.reset()
        return state, [part for part in found if part is not None]

    def _step(self, tokens: np.ndarray, start: int, pages: int) -> StepInput:
        """Return the step that prefills the tokens from `start` on, and scores the tokens after them."""
        part, scored = tokens[start : start + self.max_tokens], tokens[start + 1 : start + 1 + self.max_tokens]
        page = np.arange(pages, dtype=np.int32)
        first = np.zeros(1, np.int32)
        prompts = RequestedPromptOutputs(first, np.array([len(scored)], np.int32), scored, 1, EMPTY, EMPTY)
        return structs.replace(
            dummy_step(chunks=1, tokens=len(part), cached=start, greedy=True),
            prefill_token=part,
            page_slot=np.zeros_like(page),
            page_index=page,
            page_id=page,
            prompts=prompts if len(scored) else None,
        )


def choose_kv_scales(requested: str, trial: CacheTrial) -> tuple[Tensor | None, str]:
    """Return the scales of an 8-bit cache, float32 `[layers, 2, K]`, and in words where they come from.

    They are the checkpoint's, if it has any, else calibrated on the model. None if `requested` rules them out, or if
    scales are found for each token.
    """
    if requested == "int8":
        return None, "with a scale for each token and head"
    if requested == "fp8_unscaled":
        return None, "without scales"
    stored = trial.model.kv_scales()
    if stored is not None:
        return stored, "with the checkpoint's scales"
    tokens = trial.tokens(MAX_CALIBRATION_TOKENS, seed=1)
    state, _ = trial.run(tokens, trial.model.dtype)
    return calibrated(state.kv[:, :, : state.num_pages]), f"with scales calibrated on {len(tokens)} random tokens"


def calibrated(kv: Tensor) -> Tensor:
    """Return scales, `[layers, 2, pages, page_size, K, D] -> [layers, 2, K]`, from the keys and values of a cache.

    Scales are powers of two. They change no number's mantissa, so that numbers within the range of float8 are rounded
    as without a scale, and ranks and replicas agree although their sums differ in the last bits. A head with zeros
    only, or with numbers that are not finite, gets the scale 1.
    """
    least = kv.abs().amax((2, 3, 5)).float().cpu() * (HEADROOM / FLOAT8_MAX)
    scales = torch.ldexp(torch.ones_like(least), torch.frexp(least).exponent)
    usable = (least > 0) & scales.isfinite() & scales.reciprocal().isfinite()
    return torch.where(usable, scales, 1.0).to(kv.device)


def report_cache_error(trial: CacheTrial, cache_dtype: torch.dtype, scales: Tensor | None, origin: str) -> None:
    """Log how log-probabilities of random tokens differ between caches of `cache_dtype` and of the model's dtype.

    A float8 cache without scales gets a warning. Rank 0 of the last stage logs.
    """
    tokens, exact_dtype = trial.tokens(MAX_SCORED_TOKENS, seed=0), trial.model.dtype
    (_, exact), (_, found) = trial.run(tokens, exact_dtype), trial.run(tokens, cache_dtype, scales)
    if not exact or trial.pipeline.coordinates.rank:
        return
    error = np.abs(_joined(found, "logprob") - _joined(exact, "logprob"))
    log.log(
        logging.WARNING if scales is None and cache_dtype.is_floating_point else logging.INFO,
        "the KV cache holds %s %s: log-probabilities of %d random tokens differ by %.2g on average, and by %.2g at "
        "most, from those with a cache of %s; another token is the most likely one in %.1f %% of positions",
        *(_name(cache_dtype), origin, len(error), error.mean(), error.max(), _name(exact_dtype)),
        100 * float((_joined(found, "top_token") != _joined(exact, "top_token")).mean()),
    )


def _joined(parts: list[PromptValues], name: str) -> np.ndarray:
    return np.concatenate([getattr(part, name) for part in parts])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

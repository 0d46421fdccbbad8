"""Resolve the model's configuration and the step sizes that an EngineConfig leaves open."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tok_core.config import MAX_DRAFT_TOKENS, MAX_DRAFTING, EngineConfig
from tok_core.errors import InvalidField
from tok_core.model_config import ModelConfig, read_config
from tok_core.models import resolve_tied_embeddings

log = logging.getLogger("tok_core")


def resolve_model_config(config: EngineConfig, path: Path) -> ModelConfig:
    """Return the model's config, with tied embeddings as in the checkpoint.

    Sliding windows that are not shorter than `max_model_len` are dropped.
    """
    model = read_config(path, config.ignore_config_keys or ())
    if config.load_format != "dummy" and model.tied:
        model = resolve_tied_embeddings(model, path)
        if not model.tied:
            log.warning(
                "%s: tie_word_embeddings is true, but lm_head.weight differs from the embedding and is used", path
            )
    longest = config.max_model_len or model.max_positions
    windows = tuple(None if window is None or window >= longest else window for window in model.windows)
    return replace(model, windows=windows)


class StepSizes(NamedTuple):
    """Limits of steps.

    draft_slots  slots beyond `max_running`, which steps lend to drafts while `max_running` samples run
    """

    max_running: int
    max_step_tokens: int
    draft_slots: int

    @property
    def slots(self) -> int:
        """Return the number of slots, which is the maximum number of rows that are sampled in a step."""
        return self.max_running + self.draft_slots


def resolve_step_sizes(config: EngineConfig, device_type: str) -> StepSizes:
    """Return the limits of steps. Raises InvalidField if `max_running` exceeds `max_step_tokens`."""
    default_running, default_step_tokens = (8192, 8192) if device_type == "cuda" else (256, 1024)
    max_running = config.max_running or min(default_running, config.max_step_tokens or default_running)
    max_step_tokens = config.max_step_tokens or max(default_step_tokens, max_running)
    if max_step_tokens < max_running:
        raise InvalidField("max_step_tokens", max_step_tokens, f"at least max_running ({max_running})")
    draft_slots = 0
    if config.speculate != "off":
        longest = MAX_DRAFT_TOKENS if config.speculate == "auto" else config.speculate
        draft_slots = max(min(max_running * (1 + longest), MAX_DRAFTING, max_step_tokens) - max_running, 0)
    return StepSizes(max_running, max_step_tokens, draft_slots)


def mask_words(model: ModelConfig, path: Path) -> int:
    """Return the 32-bit words of a grammar mask; 0 without a tokenizer, and hence without guided decoding."""
    return -(-model.vocab_size // 32) if (path / "tokenizer.json").is_file() else 0

"""Pages shared by many slots are sent once and give the page tables that single entries would give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from support.engines import cpu_engine, manager_of, random_prompts
from support.tiny_models import make_model, reference_greedy
from tok_core import SamplingParams
from tok_core.messages import SharedPages, StepInput, decoder, encode
from tok_core.model_config.model_config import read_config
from tok_core.worker.staging import Staging
from tok_core.worker.startup.dummy_steps import dummy_step
from tok_core.worker.state import WorkerState, state_changes

SLOTS, PAGES = 6, 8
GREEDY = SamplingParams(n=9, temperature=0, max_tokens=40, ignore_eos=True)
LATE = SamplingParams(n=40, temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("pages") / "llama")


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_shared_pages_apply_in_order_before_single_entries(path: Path) -> None:
    cpu = torch.device("cpu")
    sizes: dict[str, Any] = {"slots": SLOTS, "num_pages": 60, "page_size": 4, "pages_per_slot": PAGES}
    state = WorkerState(read_config(path), cpu, torch.float32, **sizes)
    entries = {"page_slot": numbers(2, 4), "page_index": numbers(1, 5), "page_id": numbers(50, 51)}
    shared = [SharedPages(numbers(0, 2, 4), numbers(7, 8, 9)), SharedPages(numbers(4, 5), numbers(30, 31))]
    step = structs.replace(dummy_step(decode=1), **entries, shared=shared)
    received = decoder(StepInput).decode(encode(step))
    state.apply(received, Staging(cpu, 2).put(state_changes(received)))
    expected = np.zeros((SLOTS + 1, PAGES), np.int32)
    expected[[0, 2], :3] = 7, 8, 9
    expected[4, :3] = 30, 31, 9
    expected[5, :2] = 30, 31
    expected[2, 1], expected[4, 5] = 50, 51
    np.testing.assert_array_equal(state.columns.page_table.numpy(), expected)


@pytest.mark.parametrize("at_once", [1, 1 << 30])
def test_samples_that_share_a_prompt_match_transformers(path: Path, at_once: int) -> None:
    """Pages are few: some samples fork from the prompt's prefill, others start late."""
    prompts = random_prompts((5, 64, 130))
    wanted = [list(tokens) for tokens, _ in reference_greedy(path, prompts, 40)]
    with cpu_engine(path, kv_cache_tokens=1024, max_model_len=256, max_running=16) as engine:
        manager_of(engine).paging.min_shared_entries = at_once
        for params in (GREEDY, LATE):
            for output, tokens in zip(engine.generate(prompts, params), wanted, strict=True):
                found = [sample.token_ids for sample in output.outputs]
                assert found == [tokens[: params.max_tokens]] * params.n

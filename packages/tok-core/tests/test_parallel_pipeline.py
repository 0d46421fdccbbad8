"""Pipeline stages compute the same tokens from a manager's steps as one worker with the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from support.engines import random_prompts
from support.ranks import run_ranks
from support.stages import RecordingPorts, carry_out, record
from support.tiny_models import make_model
from tok_core import SamplingParams
from tok_core.config import all_coordinates
from tok_core.messages import StepInput

STAGES = 3


def given_away_early(steps: Sequence[StepInput]) -> int:
    """Count slots that get a new sequence while sampled tokens of the previous one are still pending."""
    count = 0
    for number, step in enumerate(steps):
        if step.new is not None:
            pending = [one.sample_slot for one in steps[:number] if one.step > step.sampled_upto]
            count += len(np.intersect1d(step.new.slot, np.concatenate(pending))) if pending else 0
    return count


def test_pipeline_stages_sample_the_tokens_of_one_worker(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path / "model", layers=3)
    prompts = random_prompts((5, 17, 30, 1, 8, 44, 9, 16, 3, 25, 12, 7))
    params = [
        SamplingParams(
            n=1 + i % 3,
            max_tokens=5 + 4 * i,
            temperature=i % 2,
            seed=i,
            top_p=0.9 if i == 3 else 1.0,
            presence_penalty=0.5 if i == 4 else 0.0,
            stop_token_ids=tuple(range(0, 512, 8)) if i > 4 else (),  # unknown to the workers
        )
        for i in range(len(prompts))
    ]
    recorded = record(path, prompts, params, pp=STAGES, run_ahead=6)
    steps = recorded.steps
    late = [step for step in steps if len(step.decode_slot) and step.sampled_upto < step.step - 2]
    assert len(late) > len(steps) / 4
    assert given_away_early(steps)
    check_stages(path, recorded)


def test_pipeline_stages_verify_drafts_as_one_worker(tmp_path: Path) -> None:
    """Slots are lent again, and given to new sequences, while the tokens of draft rows are still pending."""
    path = make_model("llama", tmp_path / "model", layers=3)
    prompt, other = random_prompts((9, 5))
    params = [SamplingParams(max_tokens=20, ignore_eos=True, seed=i % 3, top_k=20, logprobs=0) for i in range(12)]
    recorded = record(path, [prompt, other] * 6, params, pp=STAGES, run_ahead=6, speculate=3)
    drafting = [step for step in recorded.steps if step.moves is not None]
    assert len(drafting) > 10
    assert lent_early(recorded.steps)
    check_stages(path, recorded)


def lent_early(steps: Sequence[StepInput]) -> int:
    """Count slots that stand for a draft while sampled tokens of another use of them are still pending."""
    count = 0
    for number, step in enumerate(steps):
        pending = [one.sample_slot for one in steps[:number] if one.step > step.sampled_upto]
        if step.moves is not None and pending:
            lent = step.moves.slot[step.moves.slot != step.moves.source]
            count += len(np.intersect1d(lent, np.concatenate(pending)))
    return count


def check_stages(path: Path, recorded: RecordingPorts) -> None:
    """Check that stages return for the recorded steps what one worker has returned."""
    steps = recorded.steps
    outputs = run_ranks(all_coordinates(STAGES, 1), carry_out, path, steps, 6)
    for stage in range(STAGES - 1):
        assert [len(one.token) for one in outputs[stage]] == [0] * len(steps)
    assert len(recorded.taken) == len(outputs[-1]) == len(steps)
    for one, wanted in zip(outputs[-1], recorded.taken, strict=True):
        assert one.step == wanted.step
        assert np.array_equal(one.token, wanted.token)
        assert np.allclose(one.logprob, wanted.logprob, atol=1e-4)

"""A simulated pipeline of eight L40S-class GPUs has small bubbles and loses little over a slow link.

The shapes are those of Llama-3.1-70B; prompts and outputs are about as long as ShareGPT's. Tensor parallelism, whose
ranks exchange all activations twice a layer, loses most of its throughput over the same link.
"""

from __future__ import annotations

import numpy as np

from support.simulated_pipeline import (
    L40S,
    LLAMA_70B,
    NVLINK,
    PCIE4,
    Link,
    Outcome,
    PipelineSimulation,
    PipelineTimeline,
)
from tok_core import SamplingParams
from tok_core.messages import EngineInfo, Int64, Submit

CARDS = 8
PAGES = 34_000  # pages of 16 positions: the memory that weights leave of eight times 48 GB
CYCLES = 45, 25  # pipeline cycles until memory is full, and cycles measured
INFO = EngineInfo(
    vocab_size=1000,
    eos_token_ids=(7,),
    max_model_len=2048,
    num_pages=PAGES,
    page_size=16,
    max_running=2048,
    max_step_tokens=2048,
    device="simulated",
    dtype="bfloat16",
    backend="simulated",
)


def for_ever(uniform: np.ndarray) -> Int64:
    return np.full(len(uniform), 1 << 30, np.int64)


def simulate(link: Link, *, pp: int, tp: int) -> Outcome:
    """Simulate saturation: memory is full, and each request that ends frees pages for another prompt."""
    rng = np.random.default_rng(0)
    simulation = PipelineSimulation(INFO, for_ever, PipelineTimeline(LLAMA_70B, L40S, link, pp, tp))
    for rid in range(4000):
        length, output = (int(rng.lognormal(np.log(mean), 0.8)) for mean in (160, 150))
        prompt = rng.integers(0, 1000, min(max(length, 4), 1000), np.int32)
        params = SamplingParams(max_tokens=min(max(output, 4), 1000), ignore_eos=True, seed=rid)
        simulation.ports.inbox.append(Submit(rid, prompt, params))
    ramp, steady = (cycles * (pp + 1 if pp > 1 else 4) for cycles in CYCLES)
    simulation.run(ramp)
    outcome = simulation.run(steady)
    stats = simulation.manager.stats()
    assert stats.sequences_running > 800
    assert stats.requests_waiting > 500
    return outcome


def test_pipeline_has_small_bubbles_and_loses_less_than_tp_on_a_slow_link() -> None:
    stages, ranks = ([simulate(link, pp=pp, tp=tp) for link in (PCIE4, NVLINK)] for pp, tp in ((CARDS, 1), (1, CARDS)))
    assert max(one.bubble for one in stages) < 0.07
    assert stages[0].tokens_per_second > 0.95 * stages[1].tokens_per_second
    assert ranks[0].tokens_per_second < 0.5 * ranks[1].tokens_per_second
    assert stages[0].tokens_per_second > 2 * ranks[0].tokens_per_second

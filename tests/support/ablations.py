"""Simulate the manager with a mechanism taken away: `PYTHONPATH=tests python -m support.ablations length_model`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from unittest import mock

import msgspec
import numpy as np

from support.backlog import bimodal, fill, geometric, log_normal
from support.schedules import engine_info
from support.simulated_pipeline import L40S, LLAMA_70B, PCIE4, PipelineSimulation, PipelineTimeline
from tok_core import SamplingParams
from tok_core.manager.admission import length_model as length_models
from tok_core.manager.kv_cache import PrefixTree, RetainedPrompts
from tok_core.manager.prefix_groups.cascade import COSTS, CascadeCosts
from tok_core.manager.prefix_groups.grouping import MostPagesSaved
from tok_core.manager.scheduling import Microbatches, TokenBudget
from tok_core.messages import Submit

INFO = engine_info(page_size=16, num_pages=4096, max_running=2048, max_step_tokens=8192, max_model_len=8192)


def compare(name: str, run: Callable[[], str], **cases: tuple[object, str, object]) -> None:
    """Print what `run` returns as the manager is, and with a replacement in each case."""
    for case, patch in (("as it is", None), *cases.items()):
        with mock.patch.object(*patch) if patch else nullcontext():
            print(f"{name:18} {case:16} {run()}", flush=True)


def backlog(lengths: np.ndarray, prompt: int = 100, limit: int = 1024, shared: int = 0, **sizes: int) -> str:
    """Run a backlog of samples of these lengths, [requests, samples]."""
    found = fill(msgspec.structs.replace(INFO, **sizes), lengths, prompt, limit, shared)
    shares = f"pages {found.pages_settled:.1%}, preempted {found.preempted:.1%}, recomputed {found.recomputed:.1%}"
    return f"{shares}, {found.computed:,} tokens, {found.prefills:,} of {found.steps:,} steps with a prefill"


def length_model() -> None:
    """Compare the length model with its prior alone."""
    prior = (length_models, "PRIOR_WEIGHT", 1e18)
    for scale, pages, limit in ((0.25, 2048, 1024), (1, 4096, 1024), (4, 16_384, 4096)):
        for kind in (geometric, log_normal, bimodal):
            lengths = np.ceil(kind(np.random.default_rng(1), 3500) * scale).astype(np.int64).reshape(-1, 1)
            compare(f"{kind.__name__} × {scale}", partial(backlog, lengths, limit=limit, num_pages=pages), prior=prior)


def serve(stages: int, prompt: int, output: int, requests: int, running: int) -> str:
    """Run requests of log-normal lengths, of these medians, through a pipeline until none waits any more."""
    random, info = np.random.default_rng(0), msgspec.structs.replace(INFO, num_pages=34_000, max_running=running)
    timeline = PipelineTimeline(LLAMA_70B, L40S, PCIE4, stages)
    simulation = PipelineSimulation(info, lambda uniform: np.full(len(uniform), 1 << 30), timeline)
    for rid in range(requests):
        sizes = np.clip(random.lognormal(np.log([prompt, output]), 0.8), 4, [3 * prompt, 3 * output]).astype(int)
        params = SamplingParams(max_tokens=int(sizes[1]), ignore_eos=True, seed=rid)
        simulation.ports.inbox.append(Submit(rid, random.integers(0, 50, sizes[0], np.int32), params))
    simulation.run(50)
    while simulation.manager.stats().requests_waiting:
        simulation.run(50)
    idle = 1 - sum(timeline.busy) / stages / timeline.ended
    return f"{simulation.ports.tokens / timeline.ended:,.0f} tokens/s, idle {idle:.1%}"


def pipeline() -> None:
    """Keep the token budget constant; do not balance microbatches; have none to spare."""
    budget = (TokenBudget, "observe", lambda budget, exhausted: None)
    balance = (Microbatches, "balance", lambda microbatches: None)
    spare = (Microbatches, "_wanted", lambda microbatches, rows: microbatches._stages)
    loads = {"prompts": (800, 40, 3000, 2048), "even": (160, 150, 6000, 2048), "decode": (40, 300, 5000, 2048)}
    for name, load in {**loads, "16 rows": (160, 150, 100, 16), "64 rows": (160, 150, 400, 64)}.items():
        for pp in (2, 4):
            compare(f"{name}, pp = {pp}", partial(serve, pp, *load), budget=budget, balance=balance, spare=spare)


def late_starts() -> None:
    """Run 512 samples a prompt in 64 slots; then do not retain prompts; then submit each sample as a request."""
    lengths, run = geometric(np.random.default_rng(1), 2048), partial(backlog, prompt=712, max_running=64)
    compare("512 samples", partial(run, lengths.reshape(4, 512)), forget=(RetainedPrompts, "keep", lambda *_: None))
    compare("a request each", partial(run, lengths.reshape(-1, 1), shared=712))


def grouping() -> None:
    """Group 1,024 rows of random prefix trees at their costs, and at none."""
    for name, widths, depths in (("pairs", (512,), (4,)), ("prompts", (64,), (44,)), ("nested", (4, 256), (64, 8))):
        random, tree, slots = np.random.default_rng(0), PrefixTree(16), np.arange(1024)
        paths = [np.repeat(random.integers(0, widths), 16 * np.array(depths)).astype(np.int32) for _ in slots]
        for path in paths:
            tree.extend(tree.root, path, np.arange(sum(depths), dtype=np.int32))
        nodes = [tree.match(path).node for path in paths]
        for node in nodes:
            tree.lock(node)
        ids = np.array([node.id for node in nodes])
        for case, costs in (("as_it_is", COSTS), ("no_costs", CascadeCosts(0, 0, 0))):
            levels = MostPagesSaved(costs).choose(tree, slots, ids).levels
            net = -COSTS.first * bool(levels) - COSTS.level * max(0, len(levels) - 1)
            net += float(sum(((one.count - 1) * (one.kv_end - one.kv_start) // 16).sum() for one in levels))
            net -= sum(COSTS.group * len(one.count) + COSTS.member * int(one.count.sum()) for one in levels)
            print(f"{name} {case:9} {len(levels)} levels, {net:,.0f} of {1024 * sum(depths):,} pages saved")


if __name__ == "__main__":
    globals()[sys.argv[1]]()

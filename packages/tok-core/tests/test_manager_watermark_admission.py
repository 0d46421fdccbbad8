"""Watermark admission: samples start while the pages that they need now leave a share of the cache free."""

from __future__ import annotations

import numpy as np
import pytest

from support.engines import cpu_engine
from support.grouping import group_eagerly
from support.schedules import assert_all_given_back, drive, engine_info, expected, submit
from support.simulated_worker import SimulatedPorts, collect
from support.tiny_models import make_model
from tok_core import EngineConfig, SamplingParams
from tok_core.manager.admission.policies import WATERMARK, WatermarkAdmission
from tok_core.manager.loop import Manager
from tok_core.messages import EngineInfo

PROMPT = [i * 7 % 4 for i in range(40)]


def watermark_manager(info: EngineInfo) -> tuple[Manager, SimulatedPorts]:
    ports = SimulatedPorts(info, delay=1)
    config = EngineConfig(model="simulated", run_ahead=2, admission="watermark")
    manager = Manager(config, info, ports, None, lambda: 0.0)
    group_eagerly(manager)
    return manager, ports


def test_admission_names_the_policy() -> None:
    manager, _ = watermark_manager(engine_info())
    assert isinstance(manager.scheduler.admission, WatermarkAdmission)


def test_starting_samples_leave_the_watermark_free() -> None:
    manager, ports = watermark_manager(engine_info(num_pages=400, max_running=256, max_step_tokens=4096))
    params = SamplingParams(max_tokens=4, ignore_eos=True, seed=1)
    ports.inbox += [submit(rid, [rid % 4, *PROMPT[: 4 + rid % 9]], params) for rid in range(256)]
    manager.turn()
    assert manager.table.sequences_running > 50
    assert manager.scheduler.waiting
    assert manager.paging.available >= int(WATERMARK * 400)


def test_sample_that_needs_all_pages_starts_when_none_runs() -> None:
    manager, ports = watermark_manager(engine_info(num_pages=8, max_model_len=32))
    params = SamplingParams(max_tokens=4, ignore_eos=True, seed=1)
    drive(manager, ports, {0: [submit(0, PROMPT[:28], params)]})
    tokens, _ = collect(ports.reports)
    assert tokens[0, 0] == expected(PROMPT[:28], 0, params)


@pytest.mark.parametrize("seed", range(6))
def test_preempted_samples_have_the_tokens_of_enough_memory(seed: int) -> None:
    rng = np.random.default_rng(seed)
    manager, ports = watermark_manager(engine_info(num_pages=24, max_running=8, max_model_len=64))
    asked = {
        rid: (
            rng.integers(0, 4, rng.integers(1, 20)).tolist(),
            SamplingParams(n=int(rng.integers(1, 5)), max_tokens=int(rng.integers(1, 24)), ignore_eos=True, seed=1),
        )
        for rid in range(12)
    }
    arrivals = {int(3 * rid): [submit(rid, *asked[rid])] for rid in asked}
    drive(manager, ports, arrivals)
    tokens, _ = collect(ports.reports)
    for rid, (prompt, params) in asked.items():
        for sample in range(params.n):
            assert tokens[rid, sample] == expected(prompt, sample, params)
    assert manager.reclaimer.preemptions > 0
    assert_all_given_back(manager)


def test_engine_output_is_that_of_forecast_admission(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = make_model("llama", tmp_path_factory.mktemp("watermark") / "llama")
    prompts = [[17, 23, 5 + index] * 9 for index in range(6)]
    params = SamplingParams(n=3, max_tokens=24, temperature=0, ignore_eos=True)
    found = []
    for admission in ("forecast", "watermark"):
        with cpu_engine(path, admission=admission, kv_cache_tokens=256, max_model_len=64) as engine:
            outputs = engine.generate(prompts, params)
            found.append([[sample.token_ids for sample in output.outputs] for output in outputs])
    assert found[0] == found[1]

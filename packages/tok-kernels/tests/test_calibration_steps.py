"""Tests of the steps that kernels are measured on, and of their floors in bytes moved and operations computed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tok_kernels import choose
from tok_kernels.attention.interface import AttentionShape
from tok_kernels.attention.reference import attention
from tok_kernels.measure import ExpertShape, ModelShape, Timing, cuda_timer, measure_kernels
from tok_kernels.measure.cases import attention_floor, cases, forward_gemms, layer_gemms
from tok_kernels.measure.expert_cases import expert_cases
from tok_kernels.measure.kernels import KernelTime, Machine
from tok_kernels.measure.steps import AttentionProblem, AttentionStep, new_problem
from tok_kernels.measure.timing import TimedWork

CPU = torch.device("cpu")
SHAPE = AttentionShape(4, 2, 16, 4, 10, torch.float32, torch.float32)
MODEL = ModelShape(SHAPE, 48, 80, 300)
STEPS = {
    "2 × 5": AttentionStep(chunks=((5, 0),) * 2),
    "3 × 5 behind 6": AttentionStep(chunks=((5, 6),) * 3),
    "6 × 3": AttentionStep(rows=6, own=3),
    "6 × 3, 2 groups × 9": AttentionStep(rows=6, own=3, groups=2, prefix=9),
}


def problem_of(step: AttentionStep) -> AttentionProblem:
    return new_problem(step, SHAPE, CPU, 1 << 20)


@pytest.mark.parametrize("name", STEPS)
def test_an_attention_problem_has_equal_lengths_on_host_and_device(name: str) -> None:
    step = STEPS[name]
    batch, host = problem_of(step).batch, problem_of(step).batch.host
    assert host is not None
    assert step.name == name
    for ours, theirs in (
        (host.kv_len, batch.kv_len),
        (host.kv_start, batch.kv_start),
        (np.concatenate(([0], np.cumsum(host.q_len))), batch.q_start),
    ):
        assert ours.tolist() == theirs.tolist()
    for level, of_host in zip(batch.levels, host.levels, strict=True):
        for column in ("row_start", "row_count", "kv_start", "kv_end"):
            assert getattr(level, column).tolist() == getattr(of_host, column).tolist()
    assert batch.max_kv == int(batch.kv_len.max())
    assert step.phase == ("prefill" if not step.rows else "cascade" if step.groups else "decode")


def test_rows_of_a_group_share_only_their_prefix_pages() -> None:
    batch = problem_of(STEPS["6 × 3, 2 groups × 9"]).batch
    table = batch.page_table[batch.slots.long()]
    assert table.shape == (6, 3)  # 9 + 3 positions in pages of 4; 2 of the pages are shared
    assert batch.kv_start.tolist() == [8] * 6
    assert torch.equal(table[:3, :2], table[:1, :2].expand(3, 2))
    assert torch.equal(table[3:, :2], table[3:4, :2].expand(3, 2))
    assert len(set(table.flatten().tolist())) == 2 * 2 + 6


def test_a_cascade_step_equals_the_same_step_without_groups() -> None:
    problem = problem_of(STEPS["6 × 3, 2 groups × 9"])
    flat = replace(problem.batch, kv_start=torch.zeros_like(problem.batch.kv_start), levels=())
    ours, theirs = (attention(problem.q, problem.cache, one, problem.scale) for one in (problem.batch, flat))
    torch.testing.assert_close(ours, theirs)


def test_an_undersized_page_pool_lets_sequences_share_pages() -> None:
    page = 2 * SHAPE.page_size * SHAPE.kv_heads * SHAPE.head_dim * 4
    problem = new_problem(AttentionStep(rows=50, own=8), SHAPE, CPU, 10 * page)
    assert problem.cache.k.shape[0] == 10
    assert int(problem.batch.page_table.max()) < 10


def test_an_attention_step_of_unequal_groups_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"rows is 7; allowed: multiples of groups \(2\)"):
        problem_of(AttentionStep(rows=7, own=1, groups=2, prefix=4))


def test_attention_floor_counts_every_qk_pair_and_reads_shared_keys_once() -> None:
    for step in STEPS.values():
        problem = problem_of(step)
        moved, operations = attention_floor(problem, SHAPE)
        q_len = [1] * step.rows + [new for new, _ in step.chunks]
        pairs = sum(
            int(end) - count + j + 1
            for end, count in zip(problem.batch.kv_len, q_len, strict=True)
            for j in range(count)
        )
        assert operations == pairs * 4 * SHAPE.heads * SHAPE.head_dim
        keys = problem.batch.kv_len.sum() - (step.rows - step.groups) * (step.prefix if step.groups else 0)
        assert moved == int(keys) * 2 * 2 * 16 * 4 + 2 * problem.q.nbytes


def test_every_measured_kernel_states_the_bytes_it_must_move() -> None:
    found = list(cases(choose(CPU), MODEL, CPU, tokens=8, attention=tuple(STEPS.values())))
    for case in found:
        case.run()
        assert case.min_bytes > 0
    assert [case.kernel for case in found] == [
        "attention: prefill", "attention: prefill", "attention: decode", "attention: cascade",
        "sample: greedy", "sample: temperature 0.8", "sample: top-p 0.95", "sample: top-p 0.95, top-k 20",
        "sample: masks", "rms_norm",
        "rope_and_write_kv", "copy of pages",
        "gated_linear, norm", "linear, residual", "gated_linear, norm", "linear, residual", "silu_and_mul",
        *(["GEMMs of a forward pass"] * 3),
    ]  # fmt: skip
    assert [(case.size, case.tokens) for case in found if case.tokens] == [
        ("64 rows", 64), ("1024 rows", 1024), ("8 rows", 8)
    ]  # fmt: skip
    by_name = {case.kernel: case for case in found}
    assert by_name["sample: greedy"].min_bytes == 8 * 300 * 4
    assert by_name["silu_and_mul"].min_bytes == 8 * 80 * 3 * 4
    assert by_name["copy of pages"].size == "2 pages"


def test_models_with_experts_have_cases_of_experts_in_place_of_an_mlp() -> None:
    model = replace(MODEL, experts=ExpertShape(6, 2, 40, 6))
    assert list(expert_cases(choose(CPU), MODEL, CPU)) == []
    names = {case.kernel for case in cases(choose(CPU), model, CPU, tokens=8, attention=())}
    assert not names & {"gated_linear, norm", "linear, residual", "silu_and_mul", "GEMMs of a forward pass"}
    found = list(expert_cases(choose(CPU), model, CPU, tokens=(1, 30)))
    assert [case.kernel for case in found] == [
        *(["linear, router", "select_experts", "fused_experts, even", "fused_experts, Zipf"] * 2),
        "GEMMs of a forward pass",
    ]  # fmt: skip
    for case in found:
        with FlopCounterMode(display=False) as counter:
            case.run()
        assert case.flops == counter.get_total_flops()
    expert = 3 * 48 * 40 * 4
    assert [case.min_bytes for case in found if "even" in case.kernel] == [
        2 * expert + 3 * 48 * 4,
        6 * expert + 90 * 48 * 4,
    ]
    assert found[-1].tokens == 30


def test_layer_gemms_have_the_shapes_of_the_model() -> None:
    assert layer_gemms(MODEL) == ((48, (4 + 2 * 2) * 16), (4 * 16, 48), (48, 2 * 80), (80, 48))


@pytest.mark.parametrize("distinct", [1, 1 << 30], ids=["one layer's weights for all", "each layer's own"])
def test_forward_gemms_cover_all_layers_and_the_lm_head(distinct: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tok_kernels.measure.cases.FORWARD_BYTES", distinct)
    case = forward_gemms(MODEL, CPU, rows=6)
    with FlopCounterMode(display=False) as counter:
        case.run()
    parameters = 10 * sum(inputs * outputs for inputs, outputs in layer_gemms(MODEL)) + 48 * 300
    assert case.flops == 2 * 6 * parameters == counter.get_total_flops()
    assert case.min_bytes == parameters * 4


def test_kernel_time_converts_to_tokens_per_second() -> None:
    assert KernelTime("k", "s", 4.0, 1.0, tokens=8).tokens_per_second == 2000.0


def test_machine_floor_is_the_longer_of_memory_and_compute_time() -> None:
    machine = Machine(bandwidth=1000.0, rate=500.0, fp8_rate=1000.0)
    assert machine.floor_ms(10, 1) == 10.0
    assert machine.floor_ms(10, 50) == 100.0
    assert machine.floor_ms(10, 50, fp8=True) == 50.0
    assert KernelTime("k", "s", 4.0, 1.0).share == 0.25


def test_a_layer_costs_the_longer_of_device_and_host_time() -> None:
    timing = Timing(device_ms=1.0, host_ms=0.5, plan_ms=8.0)
    assert timing.per_layer(4, hidden=False) == 2.5
    assert timing.per_layer(32, hidden=False) == 1.0
    assert timing.per_layer(4, hidden=True) == 1.0
    assert timing.per_layer(4, hidden=False, others_ms=2.0) == 4.5


def test_measure_kernels_refuses_devices_other_than_cuda() -> None:
    with pytest.raises(ValueError, match="device is cpu; allowed: cuda"):
        measure_kernels(choose(CPU), MODEL, CPU)


@pytest.mark.gpu
def test_no_kernel_is_faster_than_its_floor() -> None:
    llama_1b = ModelShape(AttentionShape(32, 8, 64, 16, 16, torch.bfloat16, torch.bfloat16), 2048, 8192, 128256)
    gpu = torch.device("cuda")
    found = list(measure_kernels(choose(gpu), llama_1b, gpu)[1])
    # Small tensors stay in the GPU's L2 cache, which is faster than its memory.
    large = [one for one in found if one.floor_ms > 0.1]
    assert len(large) > 6
    assert [one for one in large if not 0 < one.share < 1.1] == []


@pytest.mark.gpu
def test_cuda_timer_separates_device_host_and_plan_time() -> None:
    x = torch.randn(1 << 26, device="cuda")
    planned: list[Tensor] = []

    def first() -> None:
        planned.append(torch.randn(1 << 22))  # a plan on the host
        x.mul_(1.0)

    timing = cuda_timer(TimedWork("", first, lambda: x.mul_(1.0)))
    assert timing.host_ms < timing.device_ms < 5.0
    assert timing.plan_ms > timing.host_ms

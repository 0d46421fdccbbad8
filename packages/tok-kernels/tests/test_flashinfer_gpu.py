"""GPU tests of FlashInfer's adapters against the reference, also while earlier steps are queued."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from support.attention_cases import Runs, Shape, build
from tok_kernels import AttentionBatch, LayerCache, choose
from tok_kernels.attention.flashinfer import Adapters
from tok_kernels.attention.interface import AttentionShape
from tok_kernels.attention.reference import attention as reference
from tok_kernels.batch import HostLengths, HostLevel
from tok_kernels.calibration import Candidate, list_candidates
from tok_kernels.measure.steps import AttentionStep, new_problem

CUDA = torch.device("cuda")
TOLERANCE = 1e-2  # relative; results are 16-bit, and some are merged from 16-bit partials
RUNS: Runs = ((3, ((0, (1, 2, 15, 17)), (1, (33,)))), (0, ((0, (40, 3)),)), (2, ((1, (5, 20)), (2, (30, 46)))))

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("flashinfer") is None, reason="needs Linux on x86-64, which FlashInfer runs on"),
    pytest.mark.filterwarnings("ignore::Warning:flashinfer.*"),
]


@pytest.fixture(params=[64, 128], ids=lambda size: f"head_dim {size}")
def shape(request: pytest.FixtureRequest) -> AttentionShape:
    return AttentionShape(32, 8, request.param, 16, 16, torch.bfloat16, torch.bfloat16)


def of_flashinfer(shape: AttentionShape) -> list[Candidate]:
    found = [one for one in list_candidates(shape, CUDA)[0] if one.planned]
    assert {one.phase for one in found} == {"prefill", "decode", "cascade"}
    return found


def hosted(batch: AttentionBatch) -> AttentionBatch:
    """Return the batch with its lengths on the host."""

    def array(values: Tensor) -> np.ndarray:
        return values.cpu().numpy().astype(np.int32)

    levels = (HostLevel(*map(array, (one.row_start, one.row_count, one.kv_start, one.kv_end))) for one in batch.levels)
    lengths = HostLengths(np.diff(array(batch.q_start)), array(batch.kv_len), array(batch.kv_start), tuple(levels))
    return replace(batch, host=lengths)


def error(out: Tensor, expected: Tensor) -> float:
    return float((out.float() - expected).norm() / expected.norm())


def test_flashinfer_phases_over_a_nan_filled_cache_match_the_reference(shape: AttentionShape) -> None:
    case = build(Shape(16, 8, 4, shape.head_dim, RUNS, ((40, 0), (3, 90), (300, 17)), 3), CUDA, torch.bfloat16)
    flat = replace(case.batch, kv_start=torch.zeros_like(case.batch.kv_start), levels=())
    expected = reference(case.q.float(), case.cache, case.batch, case.scale)
    fused = torch.full((case.q.shape[0], 48, shape.head_dim), torch.nan, device=CUDA, dtype=torch.bfloat16)
    fused[:, :32] = case.q
    decode = case.batch.num_decode
    for one in of_flashinfer(shape):
        rows = slice(decode, None) if one.phase == "prefill" else slice(decode)
        batch, kernel = hosted(flat if one.phase == "decode" else case.batch), one.build()
        for q in (case.q, fused[:, :32]):  # the second call reuses the plan of the first
            out = torch.full_like(case.q, torch.nan)
            kernel(q, case.cache, batch, case.scale, out)
            assert error(out[rows], expected[rows]) < TOLERANCE, one


def test_flashinfer_phases_over_a_scaled_fp8_cache_match_the_reference(shape: AttentionShape) -> None:
    case = build(Shape(16, 8, 4, shape.head_dim, RUNS, ((40, 0), (3, 90)), 3), CUDA, torch.bfloat16)
    k_scale, v_scale = torch.logspace(-3, 1, 8, device=CUDA), torch.logspace(2, -2, 8, device=CUDA)
    k, v = (x.to(torch.float8_e4m3fn) for x in (case.cache.k, case.cache.v))
    cache = LayerCache(k, v, k_scale, v_scale)
    flat = replace(case.batch, kv_start=torch.zeros_like(case.batch.kv_start), levels=())
    expected = reference(case.q.float(), cache, case.batch, case.scale)
    decode = case.batch.num_decode
    for one in of_flashinfer(replace(shape, cache_dtype=torch.float8_e4m3fn)):
        rows = slice(decode, None) if one.phase == "prefill" else slice(decode)
        out = torch.full_like(case.q, torch.nan)
        one.build()(case.q, cache, hosted(flat if one.phase == "decode" else case.batch), case.scale, out)
        for head in range(32):  # their sizes differ
            assert error(out[rows, head], expected[rows, head]) < TOLERANCE, one


def test_flashinfer_plans_survive_while_earlier_steps_are_queued(shape: AttentionShape) -> None:
    for one in of_flashinfer(shape):
        groups = 0 if one.phase == "decode" else 4
        steps = [
            AttentionStep(chunks=((33 + 7 * i, 16 * i),) * 3)
            if one.phase == "prefill"
            else AttentionStep(rows=48, own=30 + i, groups=groups, prefix=64 + 16 * i)
            for i in range(8)
        ]
        problems = [new_problem(step, shape, CUDA, 1 << 28) for step in steps]
        kernel = one.build()
        torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
        for problem in problems:
            kernel(problem.q, problem.cache, problem.batch, problem.scale, problem.out)
        for problem in problems:
            expected = reference(problem.q.float(), problem.cache, problem.batch, problem.scale)
            assert error(problem.out, expected) < TOLERANCE, one


def test_flashinfer_prefill_without_host_lengths_is_refused(shape: AttentionShape) -> None:
    problem = new_problem(AttentionStep(chunks=((8, 0),)), shape, CUDA, 1 << 24)
    with pytest.raises(ValueError, match="host is None; allowed if FlashInfer prefills: HostLengths"):
        Adapters(shape, CUDA).prefill("fa2")(
            problem.q, problem.cache, replace(problem.batch, host=None), problem.scale, problem.out
        )


def test_a_composed_backend_runs_mixed_steps_and_reuses_calibrations(shape: AttentionShape, tmp_path: Path) -> None:
    case = build(Shape(16, 8, 4, shape.head_dim, RUNS, ((40, 0), (3, 90)), 5), CUDA, torch.bfloat16)
    expected = reference(case.q.float(), case.cache, case.batch, case.scale)
    for requested in ("auto", "flashinfer"):
        backend = choose(CUDA, requested, shape, tmp_path)
        padded = torch.cat((case.q, case.q[:3]))  # tokens of no sequence
        out = backend.attention(padded, case.cache, hosted(case.batch), case.scale)
        assert error(out[:-3], expected) < TOLERANCE
        assert not out[-3:].any()
    assert len(list(tmp_path.iterdir())) == 2
    assert choose(CUDA, "flashinfer", shape, tmp_path).needs_host_lengths == {"prefill", "decode", "cascade"}
    assert len(list(tmp_path.iterdir())) == 2


def test_flashinfer_refuses_unsupported_shapes_by_name(tmp_path: Path) -> None:
    odd = AttentionShape(8, 2, 96, 16, 1, torch.bfloat16, torch.bfloat16)
    with pytest.raises(ValueError, match="head_dim is 96; FlashInfer's kernels allow 64, 128, 256"):
        choose(CUDA, "flashinfer", odd, tmp_path)
    single = AttentionShape(8, 2, 64, 16, 1, torch.float32, torch.float32)
    with pytest.raises(ValueError, match=r"dtype is torch\.float32; FlashInfer's kernels allow"):
        choose(CUDA, "flashinfer", single, tmp_path)

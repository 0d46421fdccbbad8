"""Tests of batch-invariant attention and GEMMs: against float64 loops, and on a CUDA device for equal bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from support.attention_cases import Case, Shape, build, flat, oracle, without_unseen
from support.attention_checks import TOLERANCE
from support.interpreted import INTERPRETING, outside, rerun
from support.noise import noise
from tok_kernels import AttentionShape
from tok_kernels import launch_config as config
from tok_kernels.attention.triton import invariant
from tok_kernels.linear import triton_invariant

suffixes = st.lists(st.integers(1, 60), min_size=1, max_size=3).map(tuple)
subruns = st.lists(st.tuples(st.integers(0, 3), suffixes), min_size=1, max_size=2).map(tuple)
shapes = st.builds(
    Shape,
    page_size=st.just(16),
    kv_heads=st.just(2),
    group=st.sampled_from([1, 4]),
    head_dim=st.just(64),
    runs=st.lists(st.tuples(st.integers(0, 9), subruns), max_size=3).map(tuple),
    prefill=st.lists(st.tuples(st.integers(1, 70), st.integers(0, 400)), max_size=2).map(tuple),
    seed=st.integers(0, 2**32 - 1),
).filter(lambda shape: shape.runs or shape.prefill)
MIXED = Shape(
    page_size=16,
    kv_heads=1,
    group=4,
    head_dim=64,
    runs=((5, ((0, (1, 2, 15, 17)), (1, (33,)))), (2, ((1, (5, 20)), (2, (30, 46))))),
    prefill=((40, 0), (3, 90), (33, 60)),
    seed=3,
)


@outside
def test_the_tests_of_this_file_pass_under_the_interpreter() -> None:
    rerun(__file__)


@pytest.fixture(params=["whole", "apart", "mixed"])
def launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute decode rows by a program for each, by one for each split, or by either; groups apart or with the rows."""
    monkeypatch.setattr(config, "multiprocessors", lambda _device: 10_000 if request.param == "apart" else 1)
    monkeypatch.setattr(invariant, "_MAX_STATE_BYTES", {"whole": 0, "mixed": 1 << 14}.get(request.param, 1 << 28))
    monkeypatch.setattr(invariant, "SPLIT_KEYS", 64)


def attend(case: Case, window: int | None = None) -> Tensor:
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    try:
        return invariant.attention(case.q, case.cache, case.batch, case.scale, window)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("window", [None, 50, 100])
def test_a_mixed_step_equals_a_float64_loop(window: int | None, device: torch.device) -> None:
    case = build(MIXED, device, torch.float32 if INTERPRETING else torch.bfloat16)
    case = case if window is None else without_unseen(case, window)
    out, expected = attend(case, window).double().cpu(), torch.tensor(oracle(case, window)[0])
    assert float((out - expected).norm() / expected.norm()) < TOLERANCE[case.q.dtype]


@pytest.mark.usefixtures("launches")
@pytest.mark.skipif(INTERPRETING, reason="needs a CUDA device: the interpreter's matmul rounds by shape")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=shapes, window=st.sampled_from([None, 20, 100]))
def test_every_row_has_the_bits_of_its_sequence_alone(shape: Shape, window: int | None, device: torch.device) -> None:
    case = build(shape, device, torch.bfloat16)
    out = attend(case, window)
    assert torch.equal(attend(flat(case), window), out)
    for i in range(len(case.batch.slots)):
        first, last = case.batch.q_start[i : i + 2].tolist()
        for begin, end in ((0, last - first), (last - first - 1, last - first)):
            batch = replace(
                case.batch,
                slots=case.batch.slots[i : i + 1],
                q_start=torch.tensor([0, end - begin], dtype=torch.int32, device=device),
                kv_len=case.batch.kv_len[i : i + 1] - (last - first - end),
                kv_start=torch.zeros_like(case.batch.kv_start[:1]),
                num_decode=int(end - begin == 1),
                max_q=end - begin,
                levels=(),
            )
            alone = attend(replace(case, q=case.q[first + begin : first + end], batch=batch), window)
            assert torch.equal(alone, out[first + begin : first + end])


@pytest.mark.skipif(INTERPRETING, reason="needs a CUDA device: the interpreter has no warps")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_shared_and_unshared_rows_have_equal_bits(
    head_dim: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four warps share each of few rows; of many rows, each has a warp."""
    case = build(replace(MIXED, head_dim=head_dim), device, torch.bfloat16)
    shared = attend(case, None)
    monkeypatch.setattr(invariant, "_MAX_SHARED_PROGRAMS", (0, 0))
    monkeypatch.setattr(invariant, "_MAX_FEW_PROGRAMS", 0)
    assert torch.equal(attend(case, None), shared)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", torch.float32),
        ("cache_dtype", torch.float8_e4m3fn),
        ("head_dim", 32),
        ("head_dim", 256),
        ("heads", 136),
    ],
)
def test_shapes_that_were_not_compared_are_refused_by_name(field: str, value: object) -> None:
    shape = AttentionShape(32, 8, 64, 16, 2, torch.bfloat16, torch.bfloat16)
    assert invariant.not_invariant_reason(shape) is None
    refused = invariant.not_invariant_reason(replace(shape, **{field: value}))  # type: ignore[arg-type]
    assert refused is not None
    assert str(value) in refused
    assert "batch_invariant allows" in refused


@pytest.mark.parametrize("tokens", [1, 3, 16, 20])
@pytest.mark.parametrize(("outputs", "inputs"), [(24, 64), (5, 264), (130, 600)])
@pytest.mark.parametrize("parts", ["", "bias", "residual", "bias norm residual"])
def test_few_rows_equal_a_float64_matmul(
    tokens: int, outputs: int, inputs: int, parts: str, device: torch.device
) -> None:
    dtype = torch.float16  # the interpreter truncates float32 to bfloat16
    x, weight = (noise(size, inputs, dtype=dtype, device=device) for size in (tokens, outputs))
    weight /= inputs**0.5
    bias = noise(outputs, dtype=dtype, device=device) if "bias" in parts else None
    norm = (noise(inputs, dtype=dtype, device=device), 1e-5) if "norm" in parts else None
    residual = noise(tokens, outputs, dtype=dtype, device=device) if "residual" in parts else None
    normed = x.double()
    if norm is not None:
        normed = normed / (normed.square().mean(-1, keepdim=True) + norm[1]).sqrt() * norm[0].double()
    expected = functional.linear(normed, weight.double(), None if bias is None else bias.double())
    expected += 0 if residual is None else residual.double()
    out = triton_invariant.linear(x, weight, bias, norm=norm, residual_TN=residual)
    torch.testing.assert_close(out.double(), expected, rtol=4e-3, atol=4e-3)
    assert residual is None or out is residual


@pytest.mark.parametrize("tokens", [1, 16, 17])
@pytest.mark.parametrize("biased", [False, True])
def test_gated_few_rows_equal_a_float64_matmul(tokens: int, biased: bool, device: torch.device) -> None:
    x, weight = (noise(size, 264, dtype=torch.float16, device=device) for size in (tokens, 140))
    weight /= 264**0.5
    bias = noise(140, dtype=torch.float16, device=device) if biased else None
    both = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    gate, up = both.chunk(2, dim=-1)
    found = triton_invariant.gated_linear(x, weight, bias).double()
    torch.testing.assert_close(found, functional.silu(gate) * up, rtol=6e-3, atol=6e-3)


@pytest.mark.skipif(INTERPRETING, reason="needs a CUDA device: cuBLASLt is compared")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("outputs", "inputs"), [(2048, 8192), (4096, 14336), (6144, 4096), (1544, 1368)])
def test_rows_of_gemms_have_the_same_bits_among_any_number(
    outputs: int, inputs: int, dtype: torch.dtype, device: torch.device
) -> None:
    triton_invariant.forbid_split_k()
    x, weight = (noise(size, inputs, dtype=dtype, device=device) for size in (2048, outputs))
    weight /= inputs**0.5
    residual, bias = noise(2048, outputs, dtype=dtype, device=device), noise(outputs, dtype=dtype, device=device)

    def multiply(rows: int) -> tuple[Tensor, Tensor]:
        added = triton_invariant.linear(x[:rows], weight, bias, residual_TN=residual[:rows].clone())
        return added, triton_invariant.gated_linear(x[:rows], weight, bias)

    whole = multiply(2048)
    for rows in (*range(1, 73), 100, 128, 200, 300, 512, 1000):
        assert all(torch.equal(one, all_rows[:rows]) for one, all_rows in zip(multiply(rows), whole, strict=True)), rows

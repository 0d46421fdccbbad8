"""On a CPU, the batch-invariant backend gives a row the same bits whatever rows are computed beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from support.attention_cases import Case, Shape, build, flat, oracle, without_unseen
from tok_kernels import SamplingBatch, choose, log_sum_exp
from tok_kernels.linear import invariant

BACKEND = choose(torch.device("cpu"), batch_invariant=True)
suffixes = st.lists(st.integers(1, 150), min_size=1, max_size=4).map(tuple)
subruns = st.lists(st.tuples(st.integers(0, 2), suffixes), min_size=1, max_size=2).map(tuple)
shapes = st.builds(
    Shape,
    page_size=st.sampled_from([1, 4, 16]),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 3, 4, 20]),
    head_dim=st.sampled_from([16, 24]),
    runs=st.lists(st.tuples(st.integers(0, 3), subruns), max_size=3).map(tuple),
    prefill=st.lists(st.tuples(st.integers(1, 90), st.integers(0, 90)), max_size=3).map(tuple),
    seed=st.integers(0, 2**32 - 1),
).filter(lambda shape: shape.runs or shape.prefill)


@pytest.fixture(params=[1, 2], autouse=True)
def threads(request: pytest.FixtureRequest) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def noise(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 48), (100, 60), (33, 7), (512, 128), (1, 256)])
def test_rows_of_linear_layers_do_not_depend_on_other_rows(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    x, weight, bias = noise(70, inputs, dtype=dtype), noise(outputs, inputs, dtype=dtype), noise(outputs, dtype=dtype)
    residual, norm = noise(70, outputs, dtype=dtype), (noise(inputs), 1e-5)
    calls: list[Callable[[slice], Tensor]] = [
        lambda rows: BACKEND.linear(x[rows], weight, bias),
        lambda rows: BACKEND.linear(x[rows], weight, norm=norm, residual_TN=residual[rows].clone()),
    ]
    if outputs % 2 == 0:
        calls.append(lambda rows: BACKEND.gated_linear(x[rows], weight, bias))
    for call in calls:
        whole = call(slice(None))
        for start, stop in ((0, 1), (0, 17), (3, 5), (15, 17), (40, 70), (69, 70)):
            torch.testing.assert_close(call(slice(start, stop)), whole[start:stop], rtol=0, atol=0)
    expected = functional.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(
        calls[0](slice(None)).double(), expected, rtol=2e-2, atol=5e-2 if dtype.itemsize == 2 else 1e-4
    )


def test_a_cpu_whose_gemm_rounds_by_place_multiplies_single_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_place(x_TK: Tensor, weight_NK: Tensor, *_: object) -> Tensor:
        return functional.linear(x_TK, weight_NK) * (1 + torch.arange(len(x_TK)).unsqueeze(1) * 1e-6)

    monkeypatch.setattr(invariant, "matmul", by_place)
    monkeypatch.setattr(invariant, "_tile_rows", invariant._tile_rows.__wrapped__)
    x, weight = noise(20, 12), noise(8, 12)
    rows = [BACKEND.linear(row[None], weight) for row in x]
    torch.testing.assert_close(BACKEND.linear(x, weight), torch.cat(rows), rtol=0, atol=0)


@settings(max_examples=30, deadline=None)
@given(shape=shapes, window=st.sampled_from([None, 1, 20, 64, 100]))
def test_attention_equals_a_float64_loop_and_each_sequence_alone(shape: Shape, window: int | None) -> None:
    case = build(shape, torch.device("cpu"))
    case = case if window is None else without_unseen(case, window)
    out = attend(case, window)
    np.testing.assert_allclose(out.double().numpy(), oracle(case, window)[0], atol=1e-5)
    assert torch.equal(attend(flat(case), window), out)
    for i in range(len(case.batch.slots)):
        first, last = case.batch.q_start[i : i + 2].tolist()
        assert torch.equal(attend(alone(case, i, 0, last - first), window), out[first:last])
        for cut in {1, (last - first) // 2, last - first - 1} - {0, -1}:
            parts = [attend(alone(case, i, *part), window) for part in ((0, cut), (cut, last - first))]
            assert torch.equal(torch.cat(parts), out[first:last])


def attend(case: Case, window: int | None) -> Tensor:
    return BACKEND.attention(case.q, case.cache, case.batch, case.scale, window)


def alone(case: Case, i: int, begin: int, end: int) -> Case:
    """Return the step that computes query tokens `begin` to `end` of sequence i, as a decode row or as a chunk."""
    batch, first = case.batch, int(case.batch.q_start[i])
    left = int(batch.q_start[i + 1]) - first - end
    one = replace(
        batch,
        slots=batch.slots[i : i + 1],
        q_start=torch.tensor([0, end - begin], dtype=torch.int32),
        kv_len=batch.kv_len[i : i + 1] - left,
        kv_start=torch.zeros(1, dtype=torch.int32),
        num_decode=int(end - begin == 1),
        max_q=end - begin,
        levels=(),
    )
    return replace(case, q=case.q[first + begin : first + end], batch=one)


@pytest.mark.parametrize("rows", [1, 2, 9])
def test_logprobs_and_tokens_do_not_depend_on_the_number_of_rows(rows: int) -> None:
    logits, index = noise(9, 50_001, seed=3) * 4, torch.arange(9)
    batch = SamplingBatch(torch.full((9,), 1.1), seed=index, sample=index * 0, position=index)
    whole = BACKEND.sample(logits.clone(), batch)
    some = replace(
        batch, **{name: getattr(batch, name)[:rows] for name in ("temperature", "seed", "sample", "position")}
    )
    found = BACKEND.sample(logits[:rows].clone(), some)
    assert torch.equal(found.token, whole.token[:rows])
    assert torch.equal(found.logprob, whole.logprob[:rows])


def test_log_sum_exp_equals_torch() -> None:
    logits = torch.cat(
        (noise(70, 1000, seed=5) * 9, torch.tensor([[-torch.inf], [torch.inf], [torch.nan]]).expand(3, 1000))
    )
    logits[3, ::2] = -torch.inf
    torch.testing.assert_close(log_sum_exp(logits), logits.logsumexp(-1), rtol=1e-6, atol=0, equal_nan=True)


def test_other_backends_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="batch_invariant"):
        choose(torch.device("cpu"), "triton", batch_invariant=True)
    with pytest.raises(ValueError, match="batch_invariant"):
        choose(torch.device("cuda"), "flashinfer", batch_invariant=True)

"""Tests of the choice of a backend, and of composed backends that mix kernels of several origins in one step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from support.attention_cases import Shape, build
from tok_kernels import BACKENDS, AttentionBatch, LayerCache, choose
from tok_kernels.attention.interface import PHASES, AttentionShape, PhaseKernel
from tok_kernels.attention.reference import attention
from tok_kernels.backends.composed import ComposedBackend, compose
from tok_kernels.backends.triton import TritonBackend

CPU = torch.device("cpu")
SHAPE = AttentionShape(8, 2, 64, 16, 2, torch.float32, torch.float32)


def test_auto_backend_on_a_cpu_is_the_reference() -> None:
    backend = choose(CPU, "auto", SHAPE)
    assert backend.name == "reference"
    assert backend.needs_host_lengths == frozenset()
    assert not backend.capturable


@pytest.mark.parametrize("requested", ["triton", "flashinfer"])
@pytest.mark.parametrize("shape", [None, SHAPE])
def test_gpu_backends_are_refused_by_name_on_a_cpu(requested: str, shape: AttentionShape | None) -> None:
    assert requested in BACKENDS
    with pytest.raises(ValueError, match=f"backend is '{requested}'; allowed on cpu here: reference"):
        choose(CPU, requested, shape)


@pytest.mark.parametrize("requested", ["auto", "triton", "flashinfer"])
@pytest.mark.parametrize(
    ("field", "value", "allowed"), [("head_dim", 512, "at most 256"), ("page_size", 24, "powers of two")]
)
def test_shapes_that_triton_lacks_are_refused_before_calibration(
    requested: str, field: str, value: int, allowed: str, tmp_path: Path
) -> None:
    shape = replace(SHAPE, **{field: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"allowed here: reference \({field} is {value}; .*{allowed}"):
        compose(CPU, requested, shape, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_flashinfer_backend_requires_a_shape() -> None:
    with pytest.raises(ValueError, match="shape is None; allowed with backend 'flashinfer'"):
        choose(torch.device("cuda"), "flashinfer")


def spy(phase: str, calls: list[str]) -> PhaseKernel:
    """Return a kernel that records its phase and writes the rows of it as the reference does."""

    def kernel(q: Tensor, cache: LayerCache, batch: AttentionBatch, scale: float, out: Tensor) -> None:
        calls.append(phase)
        rows = slice(batch.num_decode, None) if phase == "prefill" else slice(batch.num_decode)
        out[rows] = attention(q, cache, batch, scale)[rows]

    return kernel


@pytest.mark.parametrize(
    ("grouped", "chunks", "called"),
    [
        (True, ((5, 3),), ["cascade", "prefill"]),
        (True, (), ["cascade"]),
        (False, ((5, 3),), ["decode", "prefill"]),
        (None, ((5, 3), (2, 0)), ["prefill"]),
    ],
)
def test_each_phase_of_a_step_is_computed_by_its_own_kernel(
    grouped: bool | None, chunks: tuple[tuple[int, int], ...], called: list[str]
) -> None:
    runs = () if grouped is None else ((2 if grouped else 0, ((0, (3, 18)),)),)
    case = build(Shape(4, 2, 2, 16, runs, chunks, seed=1), CPU)
    batch = case.batch if grouped else replace(case.batch, levels=())
    padded = torch.cat((case.q, case.q[:2])) if chunks else case.q  # tokens of no sequence get zeros
    calls: list[str] = []
    kernels = {phase: spy(phase, calls) for phase in PHASES}
    backend = ComposedBackend("mixed", kernels, frozenset({"prefill"}), torch.float32)
    out = backend.attention(padded, case.cache, batch, case.scale)
    assert calls == called
    assert torch.equal(out, attention(padded, case.cache, batch, case.scale))


@pytest.mark.parametrize(("window", "cached"), [(7, torch.float32), (None, torch.bfloat16)])
def test_sliding_windows_and_other_cache_dtypes_fall_back_to_triton(
    window: int | None, cached: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, calls = build(Shape(4, 2, 2, 16, ((2, ((0, (3, 18)),)),), ((5, 3),), seed=1), CPU), list[str]()
    cache = LayerCache(case.cache.k.to(cached), case.cache.v.to(cached))

    def by_triton(_self: object, *given: object) -> Tensor:
        assert given == (case.q, cache, case.batch, case.scale, window)
        calls.append("triton")
        return case.q

    monkeypatch.setattr(TritonBackend, "attention", by_triton)
    backend = ComposedBackend("mixed", {phase: spy(phase, calls) for phase in PHASES}, frozenset(), torch.float32)
    assert backend.attention(case.q, cache, case.batch, case.scale, window) is case.q
    assert calls == ["triton"]


def test_only_backends_that_decode_without_a_plan_are_capturable() -> None:
    assert ComposedBackend("mixed", {}, frozenset(), torch.float32).capturable
    for phase in PHASES:
        backend = ComposedBackend("mixed", {}, frozenset({phase}), torch.float32)
        assert backend.needs_host_lengths == {phase}
        assert backend.capturable is (phase == "prefill")

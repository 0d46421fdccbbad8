"""Tests of mixtures of experts: routing, sorted pairs and grouped GEMMs against the definition in float64."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from support.interpreted import INTERPRETING, outside, rerun
from support.matmul_weights import dense_experts, routing_of, scaled_weight
from support.noise import noise
from tok_kernels import (
    MAX_TILES,
    AttentionShape,
    ExpertCopies,
    ExpertWeights,
    PackedWeight,
    Routing,
    ScaledWeight,
    pack_columns,
)
from tok_kernels.backends.reference import InvariantReferenceBackend, ReferenceBackend
from tok_kernels.backends.triton import TritonBackend
from tok_kernels.linear.triton_config import GemvLaunch
from tok_kernels.linear.triton_quantize import quantize_rows
from tok_kernels.measure import ExpertShape, ModelShape
from tok_kernels.measure.expert_cases import expert_cases
from tok_kernels.moe import triton_invariant
from tok_kernels.moe.interface import COPY_TOKENS, Weight
from tok_kernels.moe.triton import GroupedLaunch, fused_experts_with
from tok_kernels.moe.triton_gemv import combining_expert_gemv, gated_expert_gemv
from tok_kernels.moe.triton_route import sort_pairs

BACKENDS = (ReferenceBackend(), TritonBackend())
# The interpreter truncates float32 to bfloat16 instead of rounding it.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (not INTERPRETING)
SHAPES = ((1, 8, 2), (2, 6, 3), (5, 6, 3), (40, 4, 2), (33, 12, 1), (700, 16, 2))  # tokens, experts, experts of a token
# Tests of sorting take all shapes. For GEMMs, 70 tokens of 4 experts have the tiles of 700 tokens of 16, and fewer.
GEMM_SHAPES = (*SHAPES[:-1], (70, 4, 2)) if INTERPRETING else SHAPES
MANY = 70 if INTERPRETING else 200  # tokens of 4 experts with the largest tiles


@outside
def test_the_tests_of_this_file_pass_under_the_interpreter() -> None:
    rerun(__file__)


def unquantized(x: Tensor, weight: Weight) -> Tensor:
    return x.double()


def quantized(x: Tensor, weight: Weight) -> Tensor:
    """Return x after quantisation for a GEMM with `weight`, as float64."""
    assert isinstance(weight, ScaledWeight)
    rows = quantize_rows(x.to(torch.float16), weight)
    scale_TK = rows.scale_TG.repeat_interleave(weight.group or x.shape[1], 1)[:, : x.shape[1]]
    return (rows.values_TK.double() * scale_TK)[: len(x)]


def exact(
    x_TN: Tensor,
    routing: Routing,
    weights: ExpertWeights,
    activations: Callable[[Tensor, Weight], Tensor] = unquantized,
) -> Tensor:
    """Return the sum over all experts, with weight 0 for those that are not chosen.

    activations  returns the left operand of a GEMM with a weight, as float64
    """
    weight_TE = torch.zeros((len(x_TN), routing.experts), dtype=torch.float64, device=x_TN.device)
    weight_TE.scatter_(1, routing.expert_TC.long(), routing.weight_TC.double())
    out_TN = torch.zeros_like(x_TN, dtype=torch.float64)
    for expert, weight_T in enumerate(weight_TE.unbind(1)):
        gate_up, down = (one.double() for one in weights.dense(expert, routing.experts, torch.float32))
        gate, up = (activations(x_TN, weights.gate_up) @ gate_up.t()).chunk(2, -1)
        out_TN += weight_T[:, None] * (activations(functional.silu(gate) * up, weights.down) @ down.t())
    return out_TN


def assert_near(found: Tensor, expected: Tensor, scale: float | None = None) -> None:
    step = 16 * torch.finfo(found.dtype).eps
    atol = step * (float(expected.std()) if scale is None else scale)
    torch.testing.assert_close(found.double(), expected, rtol=step, atol=atol)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("tokens", "experts", "chosen"), [*SHAPES, (3, 1, 1), (4, 128, 8)])
def test_the_most_likely_experts_are_chosen(
    tokens: int, experts: int, chosen: int, normalize: bool, device: torch.device
) -> None:
    logits_TE = noise(tokens, experts + 1, device=device)[:, :experts] * 3
    probability_TE = logits_TE.double().softmax(-1)
    expected = probability_TE.topk(chosen)
    weight_TC = expected.values / (expected.values.sum(-1, keepdim=True) if normalize else 1)
    for backend in BACKENDS:
        routing = backend.select_experts(logits_TE, chosen, normalize=normalize)
        assert routing.expert_TC.tolist() == expected.indices.tolist()
        torch.testing.assert_close(routing.weight_TC.double(), weight_TC, rtol=1e-5, atol=1e-6)


def test_blocks_of_tokens_use_the_copies_of_an_expert_in_turn(device: torch.device) -> None:
    slots = torch.tensor([[1, 0, 0, 0], [2, 4, 1, 0], [1, 2, 0, 0], [3, 5, 3, 6]], dtype=torch.int32, device=device)
    copies, logits_TE = ExpertCopies(slots, 7), noise(7 * COPY_TOKENS - 5, 4, device=device)
    expected = []
    for token, experts in enumerate(ReferenceBackend().select_experts(logits_TE, 2, normalize=True).expert_TC.tolist()):
        of_experts = [slots[expert, 1 : 1 + slots[expert, 0]].tolist() for expert in experts]
        expected.append([one[token // COPY_TOKENS % len(one)] for one in of_experts])
    assert {slot for one in expected for slot in one} == set(range(7))
    for backend in BACKENDS:
        routing = backend.select_experts(logits_TE, 2, normalize=True, copies=copies)
        assert routing.expert_TC.tolist() == expected
        assert routing.experts == 7


@pytest.mark.parametrize("value", [0.5, float("-inf"), float("nan")])
def test_experts_of_equal_logits_are_distinct_and_the_lowest_come_first(value: float, device: torch.device) -> None:
    for backend in BACKENDS:
        routing = backend.select_experts(torch.full((3, 6), value, device=device), 4, normalize=True)
        assert routing.expert_TC.tolist() == [[0, 1, 2, 3]] * 3


@pytest.mark.parametrize("tokens", [2, 21])
@pytest.mark.parametrize("held", [None, range(2, 5)])
def test_rows_of_no_sequence_get_no_expert_and_no_result(held: range | None, tokens: int, device: torch.device) -> None:
    experts, size = 6, 48
    length_D = torch.tensor(([3, 0, 9, 0, 0, 1, 0, 2] * 2)[:tokens], dtype=torch.int32, device=device)
    absent_T = functional.pad(length_D == 0, (0, tokens - len(length_D)))
    logits_TE, x_TN = noise(tokens, experts, device=device), noise(tokens, size, dtype=torch.float16, device=device)
    count = len(held or range(experts))
    dense = dense_experts(count, size, 40, torch.float16, device)
    weights = ExpertWeights(dense.gate_up, dense.down, held)
    for backend in (*BACKENDS, InvariantReferenceBackend()):
        whole = backend.select_experts(logits_TE, 3, normalize=True)
        routing = backend.select_experts(logits_TE, 3, normalize=True, length_D=length_D)
        assert (routing.expert_TC[absent_T] == -1).all()
        assert torch.equal(routing.expert_TC[~absent_T], whole.expert_TC[~absent_T])
        order = sort_pairs(routing, 16, held)
        covered = [order.pair_R[start:end].tolist() for expert, start, end in order.tile_3S.t().tolist() if expert >= 0]
        own = [pair for pair, one in enumerate(routing.expert_TC.flatten().tolist()) if one in (held or range(experts))]
        assert sorted(pair for pairs in covered for pair in pairs) == own
        residual = noise(tokens, size, dtype=torch.float16, device=device).flip(0)
        expected = backend.fused_experts(x_TN, whole, weights, residual_TN=residual.clone())
        expected[absent_T] = residual[absent_T]
        found = backend.fused_experts(x_TN, routing, weights, residual_TN=residual.clone())
        assert_near(found, expected.double())


@pytest.mark.parametrize(("size", "normalize"), [(48, False), (64, True)])
def test_invariant_experts_give_a_token_the_same_bits_among_any(
    size: int, normalize: bool, device: torch.device
) -> None:
    tokens, experts, dtype = 150, 6, torch.float16
    x_TN, logits_TE = noise(tokens, size, dtype=dtype, device=device), noise(tokens, experts, device=device)
    weights = dense_experts(experts, size, 40, dtype, device)

    def computed(rows: slice) -> tuple[Tensor, Tensor]:
        routing = triton_invariant.select_experts(logits_TE[rows], 2, normalize=normalize)
        return triton_invariant.fused_experts(x_TN[rows], routing, weights), routing.weight_TC

    whole, weight_TC = computed(slice(None))
    routing = triton_invariant.select_experts(logits_TE, 2, normalize=normalize)
    assert_near(whole, exact(x_TN, routing, weights))
    for start, stop in ((0, 1), (149, 150), (3, 20), (7, 77), (0, 140)):
        found, weight = computed(slice(start, stop))
        assert torch.equal(found, whole[start:stop])
        assert torch.equal(weight, weight_TC[start:stop])


def test_invariant_experts_refuse_quantised_weights(device: torch.device) -> None:
    x_TN, dense = noise(3, 16, device=device), dense_experts(4, 16, 8, torch.float32, device)
    values = torch.zeros((64, 16), dtype=torch.int8, device=device)
    gate_up = ScaledWeight(values, torch.ones((64, 1), device=device), None)
    with pytest.raises(ValueError, match="weights are quantised; allowed in batch-invariant kernels: dense ones"):
        triton_invariant.fused_experts(x_TN, routing_of(3, 4, 2, device), ExpertWeights(gate_up, dense.down))


@pytest.mark.parametrize("tile_rows", [16, 64])
@pytest.mark.parametrize("skew", [0.0, 4.0])
@pytest.mark.parametrize(("tokens", "experts", "chosen"), SHAPES)
def test_tiles_cover_each_pair_once_with_its_expert(
    tokens: int, experts: int, chosen: int, skew: float, tile_rows: int, device: torch.device
) -> None:
    routing = routing_of(tokens, experts, chosen, device, skew)
    order = sort_pairs(routing, tile_rows)
    expert_P = routing.expert_TC.flatten()
    assert order.pair_R.tolist() == expert_P.argsort(stable=True).tolist()
    covered: list[int] = []
    for expert, start, end in order.tile_3S.t().tolist():
        if expert >= 0:
            pairs = order.pair_R[start : min(end, start + tile_rows)]
            assert (expert_P[pairs] == expert).all()
            covered += pairs.tolist()
    assert covered == order.pair_R.tolist()


@pytest.mark.parametrize(("dtype", "add"), list(zip(DTYPES, (False, True, True), strict=False)))
@pytest.mark.parametrize(("tokens", "experts", "chosen"), GEMM_SHAPES)
def test_fused_experts_equal_the_weighted_sum_of_all_experts(
    tokens: int, experts: int, chosen: int, add: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x_TN = noise(tokens, 48, dtype=dtype, device=device)
    routing, weights = routing_of(tokens, experts, chosen, device), dense_experts(experts, 48, 40, dtype, device)
    residual = noise(tokens, 48, dtype=dtype, device=device).flip(0) if add else None
    expected = exact(x_TN, routing, weights) + (0 if residual is None else residual.double())
    for backend in (*BACKENDS, InvariantReferenceBackend()):
        given = None if residual is None else residual.clone()
        found = backend.fused_experts(x_TN, routing, weights, residual_TN=given)
        assert given is None or found is given
        assert_near(found, expected)


@pytest.mark.parametrize(("group", "tokens"), [(None, 1), (None, 3), *product((32, 8), (2, 6, 21, MANY))])
@pytest.mark.parametrize("values", [torch.float8_e4m3fn, torch.int8])
def test_fused_experts_take_weights_of_8_bits(
    values: torch.dtype, group: int | None, tokens: int, device: torch.device
) -> None:
    experts, size, columns = 4, 64, 96

    def scaled(rows: int, width: int) -> ScaledWeight:
        return scaled_weight(rows, width, values, group, device)

    x_TN = noise(tokens, size, dtype=torch.float16, device=device)
    routing = routing_of(tokens, experts, 2, device)
    weights = ExpertWeights(scaled(experts * 2 * columns, size), scaled(experts * size, columns))
    expected = exact(x_TN, routing, weights)
    held = ExpertWeights(scaled(2 * 2 * columns, size), scaled(2 * size, columns), range(1, 3))
    some = torch.isin(routing.expert_TC, torch.tensor(held.local_experts, device=device))
    whole = ExpertWeights(with_zeros(held.gate_up), with_zeros(held.down))
    expected_of_held = exact(x_TN, Routing(routing.expert_TC, routing.weight_TC * some, experts), whole)
    for backend in BACKENDS:
        assert_near(backend.fused_experts(x_TN, routing, weights), expected)
        assert_near(backend.fused_experts(x_TN, routing, held), expected_of_held)


W8A8 = ((torch.float8_e4m3fn, None), (torch.float8_e4m3fn, 128), (torch.int8, None))  # values, group of columns
W8A8_TOKENS = (8, 21, 50, MANY)  # for tiles of 16, 32, 64 and 128 rows, which the code of all dtypes shares


@pytest.mark.parametrize(
    ("scaled", "tokens"),
    list(zip((*W8A8, W8A8[0]), W8A8_TOKENS, strict=True) if INTERPRETING else product(W8A8, W8A8_TOKENS)),
)
def test_experts_of_8_bits_quantise_the_activations_of_many_tokens(
    scaled: tuple[torch.dtype, int | None], tokens: int, device: torch.device
) -> None:
    (values, group), experts, size, columns = scaled, 4, 256, 192
    x_TN = noise(tokens, size, dtype=torch.float16, device=device)
    routing = routing_of(tokens, experts, 2, device, skew=0.5)
    gate_up = scaled_weight(experts * 2 * columns, size, values, group, device)
    weights = ExpertWeights(gate_up, scaled_weight(experts * size, columns, values, group, device))
    expected = exact(x_TN, routing, weights, quantized)
    found = TritonBackend().fused_experts(x_TN, routing, weights).double()
    # Tensor cores add float8 products with 14 bits, after which a few gated activations become another float8 number.
    tolerance, effect = (0.01, 0.02) if values.is_floating_point else (0.002, 0.006)
    assert (found - expected).norm() < tolerance * expected.norm()
    assert (exact(x_TN, routing, weights) - expected).norm() > effect * expected.norm()


def with_zeros(weight: Weight) -> Tensor:
    """Return the dense matrices of four experts: zeros, those of two experts, and zeros."""
    assert isinstance(weight, ScaledWeight)
    dense = weight.dense(torch.float32)
    zeros = dense.new_zeros(len(dense) // 2, dense.shape[1])
    return torch.cat([zeros, dense, zeros])


@pytest.mark.parametrize(
    ("gate_up", "down"),
    [
        (GroupedLaunch(16, 16, 32, 1, 2), GroupedLaunch(16, 64, 16, 2, 1)),
        (GroupedLaunch(64, 32, 64, 4, 3), GroupedLaunch(64, 128, 32, 8, 3)),
    ],
)
def test_every_launch_config_gives_the_same_sums(
    gate_up: GroupedLaunch, down: GroupedLaunch, device: torch.device
) -> None:
    x_TN = noise(37, 72, dtype=torch.float16, device=device)
    routing, weights = routing_of(37, 5, 2, device, skew=1.0), dense_experts(5, 72, 24, torch.float16, device)
    assert_near(fused_experts_with(gate_up, down, x_TN, routing, weights, None), exact(x_TN, routing, weights))


@pytest.mark.parametrize("launch", [GemvLaunch(4, 32, 1), GemvLaunch(16, 128, 4), GemvLaunch(2, 16, 2, 4)], ids=str)
def test_every_launch_config_of_the_gemv_gives_the_same_sums(launch: GemvLaunch, device: torch.device) -> None:
    x_TN, residual = (noise(rows, 72, dtype=torch.float16, device=device)[:2] for rows in (2, 5))
    routing, weights = routing_of(2, 5, 3, device), dense_experts(5, 72, 24, torch.float16, device)
    expected = exact(x_TN, routing, weights) + residual.double()
    h_PF, out_TN = x_TN.new_empty((2 * 3, 24)), residual.clone()
    assert isinstance(weights.gate_up, Tensor)
    assert isinstance(weights.down, Tensor)
    gated_expert_gemv(launch, x_TN, routing, weights.gate_up, range(5), h_PF)
    combining_expert_gemv(launch, h_PF, routing, weights.down, range(5), out_TN, add=True)
    assert_near(out_TN, expected)


def test_no_tokens_give_no_results(device: torch.device) -> None:
    x_TN, weights = noise(0, 16, device=device), dense_experts(4, 16, 8, torch.float32, device)
    for backend in BACKENDS:
        routing = backend.select_experts(x_TN.new_empty((0, 4)), 2, normalize=False)
        assert backend.fused_experts(x_TN, routing, weights).shape == (0, 16)


@pytest.mark.parametrize("tokens", [3, 21, MANY])
@pytest.mark.parametrize(
    ("bits", "group", "zeros", "ordered"),
    [
        (4, 32, True, False),
        (4, 64, False, False),
        (4, None, True, False),
        (8, 32, True, False),
        (8, None, False, False),
        (4, 16, True, False),
        (4, 32, True, True),
    ],
)
def test_fused_experts_take_packed_integers(
    bits: int, group: int | None, zeros: bool, ordered: bool, tokens: int, device: torch.device
) -> None:
    experts, size, columns, dtype = 4, 96, 160, torch.float16

    def packed(rows: int, width: int, parts: int) -> PackedWeight:
        source = torch.Generator().manual_seed(rows)
        q = torch.randint(0, 1 << bits, (rows, width), dtype=torch.int32, generator=source)
        groups = -(-width // (group or width))
        scale = (torch.rand((groups, rows), generator=source) + 0.5) / (1 << bits) / width**0.5 * 5
        zero = torch.randint(0, 1 << bits, (groups, rows), dtype=torch.uint8, generator=source) if zeros else None
        counters = torch.zeros(MAX_TILES, dtype=torch.int32, device=device)
        names = None
        if ordered:
            of_part = [torch.randperm(width, generator=source) // (group or width) for _ in range(parts)]
            names = torch.stack(of_part).int().to(device)
        zero = None if zero is None else zero.to(device)
        words = pack_columns(q.to(device), bits)
        return PackedWeight(
            words, scale.to(device), zero, bits, width, group, dtype, counters, names, (rows // parts,) * parts
        )

    x_TN = noise(tokens, size, dtype=dtype, device=device)
    routing = routing_of(tokens, experts, 2, device)
    weights = ExpertWeights(packed(experts * 2 * columns, size, 2 * experts), packed(experts * size, columns, experts))
    expected = exact(x_TN, routing, weights)
    for backend in BACKENDS:
        assert_near(backend.fused_experts(x_TN, routing, weights), expected, float(expected.std()))


def test_shapes_that_do_not_fit_are_refused(device: torch.device) -> None:
    x_TN, routing = noise(3, 16, device=device), routing_of(3, 4, 2, device)
    weights = dense_experts(4, 16, 8, torch.float32, device)
    triton = TritonBackend()
    with pytest.raises(ValueError, match="top_k is 5; allowed: 1 to 4"):
        triton.select_experts(noise(3, 4, device=device), 5, normalize=True)
    with pytest.raises(ValueError, match="gate_up and down have 64 and 63 rows; allowed for 4 experts"):
        triton.fused_experts(x_TN, routing, ExpertWeights(weights.gate_up, noise(63, 8, device=device)))
    with pytest.raises(ValueError, match="routing has 3 tokens; allowed: 2"):
        triton.fused_experts(x_TN[:2], routing, weights)
    with pytest.raises(ValueError, match="residual has shape"):
        triton.fused_experts(x_TN, routing, weights, residual_TN=x_TN[:2])
    for held in (range(0), range(2, 5), range(0, 4, 2)):
        with pytest.raises(ValueError, match=r"local_experts is range.*consecutive experts below 4"):
            triton.fused_experts(x_TN, routing, ExpertWeights(weights.gate_up, weights.down, held))


@pytest.mark.parametrize("skew", [0.0, 4.0])
@pytest.mark.parametrize(("tokens", "experts", "chosen"), SHAPES)
def test_tiles_cover_only_pairs_of_the_experts_held(
    tokens: int, experts: int, chosen: int, skew: float, device: torch.device
) -> None:
    routing = routing_of(tokens, experts, chosen, device, skew)
    expert_P = routing.expert_TC.flatten()
    for held in held_by_ranks(experts):
        order = sort_pairs(routing, 16, held)
        covered: list[int] = []
        for place, start, end in order.tile_3S.t().tolist():
            if place >= 0:
                pairs = order.pair_R[start : min(end, start + 16)]
                assert (expert_P[pairs] == held[place]).all()
                covered += pairs.tolist()
        expected = [pair for pair in expert_P.argsort(stable=True).tolist() if expert_P[pair] in held]
        assert covered == expected


def held_by_ranks(experts: int) -> tuple[range, ...]:
    """Return the experts of three ranks, of which tokens of a skewed law hardly choose the last."""
    return range(1), range(1, experts - 1), range(experts - 1, experts)


@pytest.mark.parametrize(("tokens", "experts", "chosen"), GEMM_SHAPES)
def test_ranks_add_the_results_of_the_experts_held_and_read_no_others(
    tokens: int, experts: int, chosen: int, device: torch.device
) -> None:
    size, columns, dtype, add = 48, 40, torch.float16, tokens > 20
    x_TN = noise(tokens, size, dtype=dtype, device=device)
    routing, whole = (
        routing_of(tokens, experts, chosen, device, 0.5),
        dense_experts(experts, size, columns, dtype, device),
    )
    scale = float(exact(x_TN, routing, whole).std())
    torch.use_deterministic_algorithms(True)  # fills uninitialised memory with NaN
    try:
        for held in held_by_ranks(experts):
            here = (routing.expert_TC >= held.start) & (routing.expert_TC < held.stop)
            expected = exact(x_TN, Routing(routing.expert_TC, routing.weight_TC * here, experts), whole)
            gate_up, down = (
                torch.cat([whole.dense(expert, experts, dtype)[part] for expert in held]) for part in range(2)
            )
            residual = noise(tokens, size, dtype=dtype, device=device).flip(0) if add else None
            expected += 0 if residual is None else residual.double()
            for backend in (*BACKENDS, InvariantReferenceBackend()):
                given = None if residual is None else residual.clone()
                found = backend.fused_experts(x_TN, routing, ExpertWeights(gate_up, down, held), residual_TN=given)
                assert_near(found, expected, scale)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("held", [6, 3])
def test_each_kernel_of_a_mixture_is_measured_beside_its_floor(held: int, device: torch.device) -> None:
    attention = AttentionShape(4, 2, 16, 16, 2, torch.float32, torch.float32)
    model = ModelShape(attention, 48, 80, 300, ExpertShape(6, 2, 40, held))
    found = {case.kernel: case for case in expert_cases(TritonBackend(), model, device, tokens=(30,))}
    names = ("fused_experts", "sort_pairs", "grouped GEMM, gate and up", "grouped GEMM, down", "combine")
    laws = [f"{name}, {law}" for law in ("even", "Zipf") for name in names]
    assert list(found) == ["linear, router", "select_experts", *laws, "GEMMs of a forward pass"]
    for case in found.values():
        case.run()
        assert case.min_bytes > 0
    fused, _, gate_up, down, combine = (found[f"{name}, even"] for name in names)
    assert gate_up.flops == 2 * down.flops
    assert gate_up.flops + down.flops == fused.flops
    pairs = fused.flops // (6 * 48 * 40)
    assert pairs == 60 if held == 6 else 15 < pairs < 45
    assert combine.min_bytes == 4 * (pairs * 48 + 30 * 2 + 30 * 48)
    assert gate_up.min_bytes == 4 * (min(pairs, 30) * 48 + pairs * 40 + held * 2 * 48 * 40)
    assert down.min_bytes == 4 * (pairs * 40 + pairs * 48 + held * 48 * 40)


def test_the_kernels_of_a_single_token_are_measured_beside_their_floors(device: torch.device) -> None:
    attention = AttentionShape(4, 2, 16, 16, 2, torch.float16, torch.float16)
    model = ModelShape(attention, 48, 80, 300, ExpertShape(6, 2, 40, 6))
    found = {case.kernel: case for case in expert_cases(TritonBackend(), model, device, tokens=(1,))}
    fused, gate_up, down = (
        found[f"{name}, even"]
        for name in ("fused_experts", "expert GEMV, gate and up", "expert GEMV, down and combine")
    )
    for case in (gate_up, down):
        case.run()
    assert gate_up.flops == 2 * down.flops
    assert gate_up.flops + down.flops == fused.flops
    assert gate_up.min_bytes == 2 * (48 + 2 * 40 + 2 * 2 * 48 * 40)
    assert down.min_bytes == 2 * (2 * 40 + 48 + 2 * 48 * 40) + 4 * 2

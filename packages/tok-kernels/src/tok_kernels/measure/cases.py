"""Build the cases that `measure_kernels` times: all kernels of a backend, with their least bytes and operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle, islice

import torch
from torch import Tensor

from tok_kernels.attention.interface import AttentionShape
from tok_kernels.backend import Backend
from tok_kernels.batch import Filters, LayerCache, Masks, SamplingBatch
from tok_kernels.linear.quantized_weights import MAX_TILES, PackedWeight, ScaledWeight
from tok_kernels.measure.steps import AttentionProblem, AttentionStep, new_cache, new_problem
from tok_kernels.norm_rope_kv.rope_table import rope_table

POOL_BYTES = 4 << 30
TOKENS = 8192
CACHE_BYTES = 1 << 28  # more than a device's caches hold
INT4_GROUP = 128  # columns that share a scale
DISTINCT_BYTES = 1 << 30
"""Bytes of distinct layer weights, if the model has as many: far more than a device's caches hold."""

ATTENTION = (
    *(AttentionStep(rows=rows, own=own) for rows, own in ((1, 8192), (64, 2048), (1024, 640), (4096, 320))),
    *(AttentionStep(rows=8192, own=112, groups=groups, prefix=704) for groups in (8, 64, 256)),
    *(
        AttentionStep(chunks=((new, cached),) * count)
        for count, new, cached in ((16, 512, 0), (1, 8192, 0), (4, 512, 4096))
    ),
)


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Experts of a layer.

    experts  their number
    chosen   number of them that compute a token
    columns  columns of each (of a rank's part)
    held     number of them that the rank holds, the first ones
    """

    experts: int
    chosen: int
    columns: int
    held: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model, or of one rank's shard, that determine the times of its kernels.

    experts  experts of every layer, in place of an MLP of `intermediate_size`; None: there are none
    """

    attention: AttentionShape
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    experts: ExpertShape | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """Work `run` that moves at least `moved` bytes and does at least `operations` operations.

    `tokens` is the number of tokens if the case is a whole forward pass; else 0. `fp8`: operations are float8 GEMMs.
    """

    kernel: str
    size: str
    run: Callable[[], object]
    moved: int
    operations: int = 0
    tokens: int = 0
    fp8: bool = False


def cases(
    backend: Backend,
    model: ModelShape,
    device: torch.device,
    tokens: int = TOKENS,
    attention: tuple[AttentionStep, ...] = ATTENTION,
) -> Iterator[Case]:
    """Yield one case after the other, so that the tensors of a case are freed before the next is made.

    Those of experts, in place of the MLP's, are in `expert_cases`.
    """
    for step in attention:
        yield _attention(backend, model.attention, step, device)
    for temperature in (0.0, 0.8):
        yield _sampling(backend, model, device, tokens, temperature)
    for top_k, top_p in ((0, 0.95), (20, 0.95)):
        yield _filtered(backend, model, device, tokens, top_k, top_p)
    yield _masked(backend, model, device, tokens)
    yield _norm(backend, model, device, tokens)
    yield _rope(backend, model.attention, device, tokens)
    yield _page_copy(model.attention, device, tokens)
    if model.experts is not None:
        return
    for few in (1, tokens):
        yield from _linears(backend, model, device, few)
    for few in (1, 32, tokens) if multiplies_fp8(device) else ():
        yield from _fp8_linears(backend, model, device, few)
    for few in (1, 32, 256) if device.type == "cuda" else ():
        yield from _int4_linears(backend, model, device, few)
    yield _activation(backend, model, device, tokens)
    for rows in (64, 1024, tokens):
        yield forward_gemms(model, device, rows)


def _attention(backend: Backend, shape: AttentionShape, step: AttentionStep, device: torch.device) -> Case:
    problem = new_problem(step, shape, device, POOL_BYTES)
    moved, operations = attention_floor(problem, shape)

    def run() -> Tensor:
        return backend.attention(problem.q, problem.cache, problem.batch, problem.scale)

    return Case(f"attention: {step.phase}", step.name, run, moved, operations)


def attention_floor(problem: AttentionProblem, shape: AttentionShape) -> tuple[int, int]:
    """Return the least bytes and operations of a problem.

    The bytes are those of queries, outputs, and each key and value once; keys of a group count once for all its rows.
    The operations are those of both matmuls (scores and outputs) for each query and key that the causal mask allows.
    """
    step = problem.step
    keys = step.groups * step.prefix + step.rows * step.own + sum(new + cached for new, cached in step.chunks)
    pairs = step.rows * (step.own + (step.prefix if step.groups else 0))
    pairs += sum(new * cached + new * (new + 1) // 2 for new, cached in step.chunks)
    return keys * shape.position_bytes + 2 * problem.q.nbytes, 4 * pairs * shape.heads * shape.head_dim


def _sampling(backend: Backend, model: ModelShape, device: torch.device, rows: int, temperature: float) -> Case:
    logits = torch.randn((rows, model.vocab_size), dtype=model.attention.dtype, device=device)
    batch = _sampling_batch(rows, temperature, device)
    kind = "greedy" if temperature == 0 else f"temperature {temperature}"
    return Case(f"sample: {kind}", _size(logits), lambda: backend.sample(logits, batch), logits.nbytes)


def _sampling_batch(rows: int, temperature: float, device: torch.device) -> SamplingBatch:
    index = torch.arange(rows, device=device)
    temperature_R = torch.full((rows,), temperature, device=device)
    return SamplingBatch(temperature_R, seed=index, sample=index * 0, position=index, all_greedy=temperature == 0)


def _filtered(backend: Backend, model: ModelShape, device: torch.device, rows: int, top_k: int, top_p: float) -> Case:
    """Return a case whose logits resemble a trained model's, which makes few tokens likely.

    The floor is that of sampling without filters, because entries above a likely token lie in few blocks.
    """
    size = (rows, model.vocab_size)
    logits = torch.empty(size, dtype=model.attention.dtype, device=device)
    for part in torch.split(logits, 512):
        rank = torch.rand(part.shape, device=device) * model.vocab_size + 0.5
        part.copy_(16 - 1.2 * rank.log() + 0.5 * torch.randn(part.shape, device=device))
    batch, every = _sampling_batch(rows, 0.8, device), torch.arange(rows, device=device)
    columns = (torch.full((rows,), value, device=device) for value in (top_p, 0.0))
    batch = replace(batch, filters=Filters(every, torch.full_like(every, top_k, dtype=torch.int32), *columns))
    kind = f"top-p {top_p}" + (f", top-k {top_k}" if top_k else "")
    return Case(f"sample: {kind}", _size(logits), lambda: backend.sample(logits, batch), logits.nbytes)


def _masked(backend: Backend, model: ModelShape, device: torch.device, rows: int) -> Case:
    """Return a case in which every second token is forbidden, so that the logits are read once and written once."""
    logits = torch.randn((rows, model.vocab_size), dtype=model.attention.dtype, device=device)
    every = torch.arange(rows, device=device)
    words = torch.full((1, -(-model.vocab_size // 32)), 0x55555555, dtype=torch.int32, device=device)
    batch = replace(_sampling_batch(rows, 0.8, device), masks=Masks(every, every * 0, words))
    return Case("sample: masks", _size(logits), lambda: backend.sample(logits, batch), 2 * logits.nbytes)


def _norm(backend: Backend, model: ModelShape, device: torch.device, tokens: int) -> Case:
    x = torch.randn((tokens, model.hidden_size), dtype=model.attention.dtype, device=device)
    weight = torch.ones(model.hidden_size, dtype=x.dtype, device=device)
    return Case("rms_norm", _size(x), lambda: backend.rms_norm(x, weight, 1e-5), 2 * x.nbytes)


def _linears(backend: Backend, model: ModelShape, device: torch.device, tokens: int) -> Iterator[Case]:
    """Yield the two GEMMs of the feed-forward layer, with the arguments that a decoder uses."""
    hidden, inner, dtype = model.hidden_size, model.intermediate_size, model.attention.dtype
    x, residual = torch.randn((2, tokens, hidden), dtype=dtype, device=device)
    gated = torch.randn((tokens, inner), dtype=dtype, device=device)
    gate_up = torch.randn((2 * inner, hidden), dtype=dtype, device=device)
    down = torch.randn((hidden, inner), dtype=dtype, device=device)
    norm = (torch.ones(hidden, dtype=dtype, device=device), 1e-5)
    yield Case(
        "gated_linear, norm",
        f"{_size(x)} → {inner}",
        lambda: backend.gated_linear(x, gate_up, norm=norm),
        x.nbytes + gate_up.nbytes + gated.nbytes,
        2 * tokens * gate_up.numel(),
    )
    yield Case(
        "linear, residual",
        f"{_size(gated)} → {hidden}",
        lambda: backend.linear(gated, down, residual_TN=residual),
        gated.nbytes + down.nbytes + 2 * residual.nbytes,
        2 * tokens * down.numel(),
    )


def _fp8_linears(backend: Backend, model: ModelShape, device: torch.device, tokens: int) -> Iterator[Case]:
    """Yield a layer's GEMMs with float8 weights, with the arguments that a decoder uses.

    Each run takes other weights, which are not in the device's L2 cache.
    """
    dtype = model.attention.dtype
    for number, (inputs, outputs) in enumerate(layer_gemms(model)):
        copies = max(1, CACHE_BYTES // (inputs * outputs))
        weights = [_fp8_weight(outputs, inputs, device) for _ in range(copies)]
        x = torch.randn((tokens, inputs), dtype=dtype, device=device)
        norm = (torch.ones(inputs, dtype=dtype, device=device), 1e-5)
        kept = outputs // 2 if number == 2 else outputs
        residual = torch.zeros((tokens, outputs), dtype=dtype, device=device)
        name, run = _fp8_linear(backend, number, x, cycle(weights), norm, residual)
        moved = x.nbytes + inputs * outputs + tokens * kept * dtype.itemsize * (2 if number in (1, 3) else 1)
        yield Case(name, f"{_size(x)} → {kept}", run, moved, 2 * tokens * inputs * outputs, fp8=tokens > 1)


def _fp8_linear(
    backend: Backend,
    number: int,
    x: Tensor,
    weights: Iterator[ScaledWeight],
    norm: tuple[Tensor, float],
    residual: Tensor,
) -> tuple[str, Callable[[], object]]:
    """Return name and function of one of a layer's four GEMMs."""
    if number == 0:
        return "fp8 linear, norm", lambda: backend.scaled_linear(x, next(weights), norm=norm)
    if number == 2:
        return "fp8 gated_linear, norm", lambda: backend.scaled_gated_linear(x, next(weights), norm=norm)
    return "fp8 linear, residual", lambda: backend.scaled_linear(x, next(weights), residual_TN=residual)


def _fp8_weight(rows: int, columns: int, device: torch.device) -> ScaledWeight:
    values = torch.randn((rows, columns), device=device).mul_(100).clamp_(-448, 448)
    return ScaledWeight(values.to(torch.float8_e4m3fn), torch.full((rows, 1), 1e-4, device=device))


def _int4_linears(backend: Backend, model: ModelShape, device: torch.device, tokens: int) -> Iterator[Case]:
    """Yield the GEMMs of the feed-forward layer with weights of 4 bits, each run with other weights."""
    hidden, inner, dtype = model.hidden_size, model.intermediate_size, model.attention.dtype
    x, residual = torch.randn((2, tokens, hidden), dtype=dtype, device=device)
    gated = torch.randn((tokens, inner), dtype=dtype, device=device)
    copies = max(1, CACHE_BYTES // (hidden * inner // 2))
    gate_up, down = (
        cycle([_int4_weight(*size, dtype, device) for _ in range(copies)])
        for size in ((2 * inner, hidden), (hidden, inner))
    )
    norm = (torch.ones(hidden, dtype=dtype, device=device), 1e-5)
    bits = 4 + 40 / INT4_GROUP  # of a weight with its part of a float32 scale and a zero point of 8 bits
    yield Case(
        "int4 gated_linear, norm",
        f"{_size(x)} → {inner}",
        lambda: backend.packed_gated_linear(x, next(gate_up), norm=norm),
        x.nbytes + gated.nbytes + int(bits * 2 * inner * hidden / 8),
        4 * tokens * inner * hidden,
    )
    yield Case(
        "int4 linear, residual",
        f"{_size(gated)} → {hidden}",
        lambda: backend.packed_linear(gated, next(down), residual_TN=residual),
        gated.nbytes + 2 * residual.nbytes + int(bits * inner * hidden / 8),
        2 * tokens * inner * hidden,
    )


def _int4_weight(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> PackedWeight:
    groups = -(-columns // INT4_GROUP)
    return PackedWeight(
        words=torch.randint(-(2**31), 2**31, (rows, groups * INT4_GROUP // 8), dtype=torch.int32, device=device),
        scale_GF=torch.full((groups, rows), 1e-3, device=device),
        zero_GF=torch.full((groups, rows), 8, dtype=torch.uint8, device=device),
        bits=4,
        columns=columns,
        group=INT4_GROUP,
        dtype=dtype,
        arrived=torch.zeros(MAX_TILES, dtype=torch.int32, device=device),
    )


def multiplies_fp8(device: torch.device) -> bool:
    """Return whether the device multiplies float8 numbers: a GPU of compute capability 8.9 or newer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _rope(backend: Backend, shape: AttentionShape, device: torch.device, tokens: int) -> Case:
    heads, kv_heads, size = shape.heads, shape.kv_heads, shape.head_dim
    made = torch.float16 if shape.dtype == torch.bfloat16 else shape.dtype  # as in a decoder's QKV projection
    qkv = torch.randn((tokens, heads + 2 * kv_heads, size), dtype=made, device=device)
    q, k, v = qkv[:, :heads], qkv[:, heads:-kv_heads], qkv[:, -kv_heads:]
    cache = _empty_cache(shape, -(-tokens // shape.page_size), device)
    table = rope_table(size, tokens, 10000.0).to(device)
    index = torch.randperm(tokens, device=device)
    position = torch.arange(tokens, device=device)
    moved = qkv.nbytes + q.numel() * shape.dtype.itemsize + tokens * shape.position_bytes
    return Case(
        "rope_and_write_kv",
        _size(qkv),
        lambda: backend.rope_and_write_kv(q, k, v, position, table, cache, index, dtype=shape.dtype),
        moved,
    )


def _activation(backend: Backend, model: ModelShape, device: torch.device, tokens: int) -> Case:
    x = torch.randn((tokens, 2 * model.intermediate_size), dtype=model.attention.dtype, device=device)
    return Case("silu_and_mul", _size(x), lambda: backend.silu_and_mul(x), x.nbytes // 2 * 3)


def _page_copy(shape: AttentionShape, device: torch.device, tokens: int) -> Case:
    """Return a case that copies scattered pages of one layer to other pages, as samples do that fork."""
    pages = -(-tokens // shape.page_size)
    cache = _empty_cache(shape, 2 * pages, device)
    source, target = torch.randperm(2 * pages, device=device).view(2, pages)
    # Not every operation supports 8-bit floats.
    parts = [part.view(torch.uint8) if part.itemsize == 1 else part for part in (cache.k, cache.v)]
    parts += [scale for scale in (cache.k_token_scale, cache.v_token_scale) if scale is not None]

    def run() -> None:
        for part in parts:
            part[target] = part[source]

    return Case("copy of pages", f"{pages} pages", run, sum(part.nbytes for part in parts))


def layer_gemms(model: ModelShape) -> tuple[tuple[int, int], ...]:
    """Return (inputs, outputs) of a layer's GEMMs: QKV projection, output projection, gate and up, down."""
    shape, hidden, inner = model.attention, model.hidden_size, model.intermediate_size
    queries = shape.heads * shape.head_dim
    return (
        (hidden, queries + 2 * shape.kv_heads * shape.head_dim),
        (queries, hidden),
        (hidden, 2 * inner),
        (inner, hidden),
    )


def forward_gemms(model: ModelShape, device: torch.device, rows: int) -> Case:
    """Return the GEMMs of every layer, and of the LM head for every row, each with random inputs.

    The weights of a few layers are used in turn for all layers. The floor counts all weights once. It counts no
    activations, because these may stay in the device's cache between GEMMs.
    """
    sizes, dtype = layer_gemms(model), model.attention.dtype
    layer_bytes = sum(inputs * outputs for inputs, outputs in sizes) * dtype.itemsize
    layers = model.attention.layers
    made = min(layers, -(-DISTINCT_BYTES // layer_bytes))
    x = {width: torch.randn((rows, width), dtype=dtype, device=device) for width, _ in sizes}
    weights = [[_weight(*size, dtype, device) for size in sizes] for _ in range(made)]
    head = _weight(model.hidden_size, model.vocab_size, dtype, device)

    def forward() -> Iterator[Tensor]:
        for layer in islice(cycle(weights), layers):
            yield from layer
        yield head

    def run() -> None:
        for weight in forward():
            torch.mm(x[weight.shape[0]], weight)

    parameters = layers * layer_bytes // dtype.itemsize + head.numel()
    moved = parameters * dtype.itemsize
    return Case("GEMMs of a forward pass", f"{rows} rows", run, moved, 2 * rows * parameters, tokens=rows)


def _weight(inputs: int, outputs: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a weight `[inputs, outputs]`, transposed in memory as in a checkpoint."""
    return torch.randn((outputs, inputs), dtype=dtype, device=device).t()


def _empty_cache(shape: AttentionShape, pages: int, device: torch.device) -> LayerCache:
    size = (2, pages, shape.page_size, shape.kv_heads, shape.head_dim)
    k, v = torch.zeros(size, dtype=shape.dtype, device=device)
    return new_cache(k, v, shape.cache_dtype)


def _size(x: Tensor) -> str:
    return " × ".join(map(str, x.shape))

"""Build the cases that `measure_kernels` times: each kernel of a backend, with its minimum bytes and its FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle, islice, repeat

import torch
from torch import Tensor

from tok_kernels.attention.interface import AttentionShape
from tok_kernels.backend import Backend
from tok_kernels.batch import Filters, KVWrite, LayerCache, Masks, SamplingBatch
from tok_kernels.linear.quantized_weights import MAX_TILES, PackedWeight, ScaledWeight
from tok_kernels.measure.steps import AttentionProblem, AttentionStep, new_cache, new_problem
from tok_kernels.norm_rope_kv.rope_table import rope_table

MAX_CACHE_BYTES = 4 << 30  # of the KV cache of an attention case; far more than a device's L2 cache holds
STEP_TOKENS = 8192  # tokens of the largest steps
ROTATED_BYTES = 1 << 28  # of the weights that the runs of a case read in turn; more than an L2 cache holds
FORWARD_BYTES = 1 << 30  # of distinct layer weights in a forward pass, if the model has as many
INT4_GROUP = 128  # columns that share a scale

# Representative steps of decode, cascade and prefill.
ATTENTION_STEPS = (
    *(AttentionStep(rows=rows, own=own) for rows, own in ((1, 8192), (64, 640), (64, 2048), (1024, 640), (4096, 320))),
    AttentionStep(rows=96, own=256, groups=8, prefix=512),
    *(AttentionStep(rows=8192, own=112, groups=groups, prefix=704) for groups in (8, 64, 256)),
    *(
        AttentionStep(chunks=((new, cached),) * count)
        for count, new, cached in ((16, 512, 0), (1, 8192, 0), (4, 512, 4096))
    ),
)


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Sizes of a layer's mixture of experts.

    experts            number of experts
    top_k              experts of each token
    intermediate_size  intermediate size of an expert, or of one tensor-parallel rank's shard of it
    local_experts      number of experts whose weights this rank holds: experts 0 to local_experts − 1
    """

    experts: int
    top_k: int
    intermediate_size: int
    local_experts: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model, or of one rank's shard, that determine the times of its kernels.

    experts  mixture of experts of every layer, in place of an MLP of `intermediate_size`; None: layers have an MLP
    """

    attention: AttentionShape
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    experts: ExpertShape | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel with its inputs, and the work that determines its floor (roofline).

    kernel     name of the kernel and of its variant
    size       sizes of the inputs, as text
    run        launches the kernel
    min_bytes  minimum bytes that it reads and writes
    flops      floating-point operations of its matmuls
    tokens     number of tokens if the case is a whole forward pass; else 0
    fp8        whether the matmuls multiply float8 values
    """

    kernel: str
    size: str
    run: Callable[[], object]
    min_bytes: int
    flops: int = 0
    tokens: int = 0
    fp8: bool = False


def cases(
    backend: Backend,
    model: ModelShape,
    device: torch.device,
    tokens: int = STEP_TOKENS,
    attention: tuple[AttentionStep, ...] = ATTENTION_STEPS,
) -> Iterator[Case]:
    """Yield the cases one by one, so that the tensors of one are freed before the next is made.

    A model with experts has no cases of an MLP and of a forward pass here; `expert_cases` yields them.
    """
    for step in attention:
        yield _attention_case(backend, model.attention, step, device)
    for temperature in (0.0, 0.8):
        yield _sampling_case(backend, model, device, tokens, temperature)
    for top_k, top_p in ((0, 0.95), (20, 0.95)):
        yield _filter_case(backend, model, device, tokens, top_k, top_p)
    yield _mask_case(backend, model, device, tokens)
    yield _norm_case(backend, model, device, tokens)
    yield _rope_case(backend, model.attention, device, tokens)
    for rows in (1, 32) if device.type == "cuda" else ():
        yield _qkv_case(backend, model, device, rows)
    yield _page_copy_case(model.attention, device, tokens)
    if model.experts is not None:
        return
    for rows in (1, tokens):
        yield from _mlp_cases(backend, model, device, rows)
    for rows in (1, 32, tokens) if has_fp8_matmul(device) else ():
        yield from _fp8_cases(backend, model, device, rows)
    for rows in (1, 32, 256) if device.type == "cuda" else ():
        yield from _int4_cases(backend, model, device, rows)
    yield _activation_case(backend, model, device, tokens)
    for rows in (64, 1024, tokens):
        yield forward_gemms(model, device, rows)


def _attention_case(backend: Backend, shape: AttentionShape, step: AttentionStep, device: torch.device) -> Case:
    problem = new_problem(step, shape, device, MAX_CACHE_BYTES)
    min_bytes, flops = attention_floor(problem, shape)

    def run() -> Tensor:
        return backend.attention(problem.q, problem.cache, problem.batch, problem.scale)

    return Case(f"attention: {step.phase}", step.name, run, min_bytes, flops)


def attention_floor(problem: AttentionProblem, shape: AttentionShape) -> tuple[int, int]:
    """Return the minimum bytes and the FLOPs of a problem.

    The bytes are those of queries, outputs, and each key and value once; the shared prefix of a group counts once. The
    FLOPs are those of both matmuls (scores and outputs) for each pair of query and key that the causal mask allows.
    """
    step = problem.step
    keys = step.groups * step.prefix + step.rows * step.own + sum(new + cached for new, cached in step.chunks)
    pairs = step.rows * (step.own + (step.prefix if step.groups else 0))
    pairs += sum(new * cached + new * (new + 1) // 2 for new, cached in step.chunks)
    return keys * shape.position_bytes + 2 * problem.q.nbytes, 4 * pairs * shape.heads * shape.head_dim


def _sampling_case(backend: Backend, model: ModelShape, device: torch.device, rows: int, temperature: float) -> Case:
    logits = torch.randn((rows, model.vocab_size), dtype=model.attention.dtype, device=device)
    batch = _sampling_batch(rows, temperature, device)
    variant = "greedy" if temperature == 0 else f"temperature {temperature}"
    return Case(f"sample: {variant}", _size(logits), lambda: backend.sample(logits, batch), logits.nbytes)


def _sampling_batch(rows: int, temperature: float, device: torch.device) -> SamplingBatch:
    index = torch.arange(rows, device=device)
    temperature_R = torch.full((rows,), temperature, device=device)
    return SamplingBatch(temperature_R, seed=index, sample=index * 0, position=index, all_greedy=temperature == 0)


def _filter_case(
    backend: Backend, model: ModelShape, device: torch.device, rows: int, top_k: int, top_p: float
) -> Case:
    """Return a case whose logits resemble a trained model's, which makes few tokens likely.

    The floor is that of sampling without filters, because entries above a likely token lie in few blocks.
    """
    logits = torch.empty((rows, model.vocab_size), dtype=model.attention.dtype, device=device)
    for chunk in torch.split(logits, 512):
        rank = torch.rand(chunk.shape, device=device) * model.vocab_size + 0.5
        chunk.copy_(16 - 1.2 * rank.log() + 0.5 * torch.randn(chunk.shape, device=device))
    row = torch.arange(rows, device=device)
    filters = Filters(
        rows=row,
        top_k=torch.full_like(row, top_k, dtype=torch.int32),
        top_p=torch.full((rows,), top_p, device=device),
        min_p=torch.zeros(rows, device=device),
    )
    batch = replace(_sampling_batch(rows, 0.8, device), filters=filters)
    variant = f"top-p {top_p}" + (f", top-k {top_k}" if top_k else "")
    return Case(f"sample: {variant}", _size(logits), lambda: backend.sample(logits, batch), logits.nbytes)


def _mask_case(backend: Backend, model: ModelShape, device: torch.device, rows: int) -> Case:
    """Return a case in which every second token is forbidden, so that the logits are read once and written once."""
    logits = torch.randn((rows, model.vocab_size), dtype=model.attention.dtype, device=device)
    row = torch.arange(rows, device=device)
    bitmask = torch.full((1, -(-model.vocab_size // 32)), 0x55555555, dtype=torch.int32, device=device)
    batch = replace(_sampling_batch(rows, 0.8, device), masks=Masks(row, row * 0, bitmask))
    return Case("sample: masks", _size(logits), lambda: backend.sample(logits, batch), 2 * logits.nbytes)


def _norm_case(backend: Backend, model: ModelShape, device: torch.device, tokens: int) -> Case:
    x = torch.randn((tokens, model.hidden_size), dtype=model.attention.dtype, device=device)
    weight = torch.ones(model.hidden_size, dtype=x.dtype, device=device)
    return Case("rms_norm", _size(x), lambda: backend.rms_norm(x, weight, 1e-5), 2 * x.nbytes)


def _mlp_cases(backend: Backend, model: ModelShape, device: torch.device, tokens: int) -> Iterator[Case]:
    """Yield the two GEMMs of the MLP with dense weights."""
    dtype = model.attention.dtype
    gate_up, down = (repeat(torch.randn(size, dtype=dtype, device=device)) for size in _mlp_weight_sizes(model))
    bits = 8.0 * dtype.itemsize
    yield from _two_gemms("", model, device, tokens, backend.gated_linear, backend.linear, gate_up, down, bits)


def _int4_cases(backend: Backend, model: ModelShape, device: torch.device, tokens: int) -> Iterator[Case]:
    """Yield the two GEMMs of the MLP with 4-bit weights; each run reads other weights."""
    dtype = model.attention.dtype
    copies = max(1, ROTATED_BYTES // (model.hidden_size * model.intermediate_size // 2))
    gate_up, down = (
        cycle([_int4_weight(*size, dtype, device) for _ in range(copies)]) for size in _mlp_weight_sizes(model)
    )
    bits = 4 + 40 / INT4_GROUP  # a value, and its part of a float32 scale and an 8-bit zero point
    gated_linear, linear = backend.packed_gated_linear, backend.packed_linear
    yield from _two_gemms("int4 ", model, device, tokens, gated_linear, linear, gate_up, down, bits)


def _mlp_weight_sizes(model: ModelShape) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the shapes of the gate_up and down projections' weights, `[outputs, inputs]`."""
    hidden, inner = model.hidden_size, model.intermediate_size
    return (2 * inner, hidden), (hidden, inner)


def _two_gemms(
    prefix: str,
    model: ModelShape,
    device: torch.device,
    tokens: int,
    gated_linear: Callable[..., object],
    linear: Callable[..., object],
    gate_up: Iterator[object],
    down: Iterator[object],
    bits: float,
) -> Iterator[Case]:
    """Yield the two GEMMs of the MLP, with the fused norm and residual that a decoder uses.

    prefix         of the kernels' names
    gate_up, down  weights of the runs
    bits           bits of a weight, scales included
    """
    hidden, inner, dtype = model.hidden_size, model.intermediate_size, model.attention.dtype
    x, residual = torch.randn((2, tokens, hidden), dtype=dtype, device=device)
    h = torch.randn((tokens, inner), dtype=dtype, device=device)
    norm = (torch.ones(hidden, dtype=dtype, device=device), 1e-5)
    yield Case(
        f"{prefix}gated_linear, norm",
        f"{_size(x)} → {inner}",
        lambda: gated_linear(x, next(gate_up), norm=norm),
        x.nbytes + h.nbytes + int(bits * 2 * inner * hidden / 8),
        4 * tokens * inner * hidden,
    )
    yield Case(
        f"{prefix}linear, residual",
        f"{_size(h)} → {hidden}",
        lambda: linear(h, next(down), residual_TN=residual),
        h.nbytes + 2 * residual.nbytes + int(bits * inner * hidden / 8),
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
        split_k_counters=torch.zeros(MAX_TILES, dtype=torch.int32, device=device),
    )


def _fp8_cases(backend: Backend, model: ModelShape, device: torch.device, tokens: int) -> Iterator[Case]:
    """Yield a layer's four GEMMs with float8 weights, with the fused norm and residual that a decoder uses.

    Each run reads other weights, which are not in the device's L2 cache.
    """
    dtype = model.attention.dtype
    for gemm, (inputs, outputs) in zip(("qkv", "output", "gate_up", "down"), layer_gemms(model), strict=True):
        copies = max(1, ROTATED_BYTES // (inputs * outputs))
        weights = cycle([_fp8_weight(outputs, inputs, device) for _ in range(copies)])
        x = torch.randn((tokens, inputs), dtype=dtype, device=device)
        norm = (torch.ones(inputs, dtype=dtype, device=device), 1e-5)
        residual = torch.zeros((tokens, outputs), dtype=dtype, device=device)
        adds_residual = gemm in ("output", "down")
        written = outputs // 2 if gemm == "gate_up" else outputs
        yield Case(
            {"qkv": "fp8 linear, norm", "gate_up": "fp8 gated_linear, norm"}.get(gemm, "fp8 linear, residual"),
            f"{_size(x)} → {written}",
            _fp8_gemm(backend, gemm, x, weights, norm, residual),
            x.nbytes + inputs * outputs + tokens * written * dtype.itemsize * (2 if adds_residual else 1),
            2 * tokens * inputs * outputs,
            fp8=tokens > 1,
        )


def _fp8_gemm(
    backend: Backend,
    gemm: str,
    x: Tensor,
    weights: Iterator[ScaledWeight],
    norm: tuple[Tensor, float],
    residual: Tensor,
) -> Callable[[], object]:
    if gemm == "qkv":
        return lambda: backend.scaled_linear(x, next(weights), norm=norm)
    if gemm == "gate_up":
        return lambda: backend.scaled_gated_linear(x, next(weights), norm=norm)
    return lambda: backend.scaled_linear(x, next(weights), residual_TN=residual)


def _fp8_weight(rows: int, columns: int, device: torch.device) -> ScaledWeight:
    values = torch.randn((rows, columns), device=device).mul_(100).clamp_(-448, 448)
    return ScaledWeight(values.to(torch.float8_e4m3fn), torch.full((rows, 1), 1e-4, device=device))


def has_fp8_matmul(device: torch.device) -> bool:
    """Return whether the device multiplies float8 values: a GPU of compute capability 8.9 or newer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _rope_case(backend: Backend, shape: AttentionShape, device: torch.device, tokens: int) -> Case:
    heads, kv_heads, size = shape.heads, shape.kv_heads, shape.head_dim
    # A decoder's QKV projection has float16 outputs if the model is bfloat16.
    qkv_dtype = torch.float16 if shape.dtype == torch.bfloat16 else shape.dtype
    qkv = torch.randn((tokens, heads + 2 * kv_heads, size), dtype=qkv_dtype, device=device)
    q, k, v = qkv[:, :heads], qkv[:, heads:-kv_heads], qkv[:, -kv_heads:]
    cache = _empty_cache(shape, -(-tokens // shape.page_size), device)
    table = rope_table(size, tokens, 10000.0).to(device)
    index = torch.randperm(tokens, device=device)
    position = torch.arange(tokens, device=device)
    min_bytes = qkv.nbytes + q.numel() * shape.dtype.itemsize + tokens * shape.position_bytes
    return Case(
        "rope_and_write_kv",
        _size(qkv),
        lambda: backend.rope_and_write_kv(q, k, v, position, table, cache, index, dtype=shape.dtype),
        min_bytes,
    )


def _qkv_case(backend: Backend, model: ModelShape, device: torch.device, tokens: int) -> Case:
    """Return the QKV projection with norm, rotation and cache write; each run reads other weights."""
    shape, (inputs, outputs) = model.attention, next(iter(layer_gemms(model)))
    dtype = torch.float16 if shape.dtype == torch.bfloat16 else shape.dtype
    copies = max(1, ROTATED_BYTES // (inputs * outputs * dtype.itemsize))
    weights = cycle([torch.randn((outputs, inputs), device=device).to(dtype) for _ in range(copies)])
    x, norm_weight = torch.randn((tokens, inputs), device=device).to(shape.dtype), torch.ones(inputs, device=device)
    norm, position = (norm_weight.to(shape.dtype), 1e-5), torch.arange(tokens, device=device)
    cache, table = _empty_cache(shape, -(-tokens // shape.page_size), device), rope_table(shape.head_dim, tokens, 1e4)
    write = KVWrite(position, table.to(device), cache, position, dtype=shape.dtype)
    queries = tokens * shape.heads * shape.head_dim * shape.dtype.itemsize
    return Case(
        "project_and_write_kv, norm",
        f"{_size(x)} → {outputs}",
        lambda: backend.project_and_write_kv(x, next(weights), None, write, norm=norm),
        x.nbytes + inputs * outputs * dtype.itemsize + queries + tokens * shape.position_bytes,
        2 * tokens * inputs * outputs,
    )


def _activation_case(backend: Backend, model: ModelShape, device: torch.device, tokens: int) -> Case:
    x = torch.randn((tokens, 2 * model.intermediate_size), dtype=model.attention.dtype, device=device)
    return Case("silu_and_mul", _size(x), lambda: backend.silu_and_mul(x), x.nbytes // 2 * 3)


def _page_copy_case(shape: AttentionShape, device: torch.device, tokens: int) -> Case:
    """Return a case that copies scattered pages of one layer, as forks of samples do (copy-on-write)."""
    pages = -(-tokens // shape.page_size)
    cache = _empty_cache(shape, 2 * pages, device)
    source, target = torch.randperm(2 * pages, device=device).view(2, pages)
    # Indexing does not support float8 on every device.
    copied = [x.view(torch.uint8) if x.itemsize == 1 else x for x in (cache.k, cache.v)]
    copied += [scale for scale in (cache.k_token_scale, cache.v_token_scale) if scale is not None]

    def run() -> None:
        for x in copied:
            x[target] = x[source]

    # Each tensor has as many pages that are read as pages that are written.
    return Case("copy of pages", f"{pages} pages", run, sum(x.nbytes for x in copied))


def layer_gemms(model: ModelShape) -> tuple[tuple[int, int], ...]:
    """Return (inputs, outputs) of a layer's GEMMs: QKV projection, output projection, gate_up, down."""
    shape, hidden, inner = model.attention, model.hidden_size, model.intermediate_size
    queries = shape.heads * shape.head_dim
    return (
        (hidden, queries + 2 * shape.kv_heads * shape.head_dim),
        (queries, hidden),
        (hidden, 2 * inner),
        (inner, hidden),
    )


def forward_gemms(model: ModelShape, device: torch.device, rows: int) -> Case:
    """Return the GEMMs of all layers, and of the LM head for every row, each with random inputs.

    The weights of a few layers are used in turn for all layers. The floor counts all weights once, but no activations,
    because these may stay in the device's L2 cache between GEMMs.
    """
    sizes, dtype = layer_gemms(model), model.attention.dtype
    layer_bytes = sum(inputs * outputs for inputs, outputs in sizes) * dtype.itemsize
    layers = model.attention.layers
    distinct = min(layers, -(-FORWARD_BYTES // layer_bytes))
    x = {width: torch.randn((rows, width), dtype=dtype, device=device) for width, _ in sizes}
    weights = [[_weight(*size, dtype, device) for size in sizes] for _ in range(distinct)]
    head = _weight(model.hidden_size, model.vocab_size, dtype, device)

    def run() -> None:
        for layer in islice(cycle(weights), layers):
            for weight in layer:
                torch.mm(x[weight.shape[0]], weight)
        torch.mm(x[head.shape[0]], head)

    parameters = layers * layer_bytes // dtype.itemsize + head.numel()
    min_bytes = parameters * dtype.itemsize
    return Case("GEMMs of a forward pass", f"{rows} rows", run, min_bytes, 2 * rows * parameters, tokens=rows)


def _weight(inputs: int, outputs: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a random weight `[inputs, outputs]`, transposed in memory as in a checkpoint."""
    return torch.randn((outputs, inputs), dtype=dtype, device=device).t()


def _empty_cache(shape: AttentionShape, pages: int, device: torch.device) -> LayerCache:
    size = (2, pages, shape.page_size, shape.kv_heads, shape.head_dim)
    k, v = torch.zeros(size, dtype=shape.dtype, device=device)
    return new_cache(k, v, shape.cache_dtype)


def _size(x: Tensor) -> str:
    return " × ".join(map(str, x.shape))

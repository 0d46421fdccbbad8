"""Write a dense checkpoint with its linear layers quantised, in the format of compressed-tensors."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tok_core.config import RankCoordinates
from tok_core.errors import InvalidField, ModelError
from tok_core.model_config import read_config
from tok_core.models.layers import Linear, Placement
from tok_core.models.weights.loading import INDEX, checkpoint_files, mixtral_name
from tok_core.parallel import ShardPlan, Slice
from tok_core.quantization import (
    FLOATS,
    NOT_FINITE,
    LinearMethod,
    PackQuantizedMethod,
    QuantizationConfig,
    ScaledMethod,
    read_quantization,
)
from tok_kernels import choose

# Tensor names: linear layers of all supported families but the LM head and routers; the stacked matrices of all
# experts; any matrix of a layer.
# Files of weights, which are not copied: other libraries might read those of the dense model.
WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx"})
LINEAR = re.compile(r"layers\.\d+\..*(_proj|\.experts\.\d+\.w[123])\.weight$")
STACKED = re.compile(r"(.*layers\.\d+\.mlp\.experts\.)(gate_up|down)_proj$")
IN_LAYER = re.compile(r".*layers\.\d+\.(.+)\.weight$")
CPU, FLOAT8, BLOCK = torch.device("cpu"), torch.float8_e4m3fn, (128, 128)  # BLOCK: rows and columns
# compressed-tensors' QuantizationArgs of activations, with a scale for each token, and of weights.
TOKEN_ARGUMENTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
WEIGHT_ARGUMENTS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}


@dataclass(frozen=True, slots=True)
class QuantizationScheme:
    """A weight format, and its description in compressed-tensors' config.

    multiples        numbers that a matrix's rows and columns must be multiples of
    tensor_format    `format` of the config
    weights, inputs  QuantizationArgs of weights and of activations; None: activations are not quantised
    """

    multiples: tuple[int, int]
    method: LinearMethod
    tensor_format: str
    weights: Mapping[str, object]
    inputs: Mapping[str, object] | None


@dataclass(frozen=True, slots=True)
class WrittenTensor:
    """A tensor that has been written.

    error   relative error: norm of the difference to the dense tensor over that tensor's norm; None: not quantised
    source  name of the dense checkpoint's tensor that it comes from
    """

    name: str
    error: float | None
    source: str


def _int4(group: int) -> QuantizationScheme:
    """Return the scheme of 4-bit integers with a scale for each `group` columns."""
    method = PackQuantizedMethod(bits=4, group=group)
    weights = {**WEIGHT_ARGUMENTS, "num_bits": 4, "type": "int", "strategy": "group", "group_size": group}
    return QuantizationScheme((1, group), method, "pack-quantized", weights, None)


SCHEMES: Mapping[str, QuantizationScheme] = MappingProxyType(
    {
        "fp8-dynamic": QuantizationScheme(
            (1, 1),
            ScaledMethod(FLOAT8),
            "float-quantized",
            {**WEIGHT_ARGUMENTS, "strategy": "channel"},
            TOKEN_ARGUMENTS,
        ),
        "fp8-block": QuantizationScheme(
            BLOCK,
            ScaledMethod(FLOAT8, block=BLOCK),
            "float-quantized",
            {**WEIGHT_ARGUMENTS, "strategy": "block", "block_structure": list(BLOCK)},
            {**TOKEN_ARGUMENTS, "strategy": "group", "group_size": BLOCK[1]},
        ),
        "int4-g128": _int4(128),
        "int4-g64": _int4(64),
    }
)


def quantize_checkpoint(source: Path, out: Path, scheme: str) -> Generator[WrittenTensor, None, None]:
    """Write the model in directory `source` to the new directory `out`, with its linear layers rounded to the nearest.

    Embedding, LM head, norms and routers stay as they are. Stacked experts are split into a tensor for each matrix,
    with the names of Mixtral's and Qwen's checkpoints. Yields each tensor once it is quantised. A file is written when
    all its tensors are, and config.json last. One file of tensors is in memory at a time.
    Errors: InvalidField for an unknown scheme or an `out` that exists; ModelError for a model that cannot be read or
    is quantised already, for columns that the scheme cannot divide, for weights that are not finite, and for an `out`
    that cannot be written. After an error or an interruption there is no `out`.
    """
    if scheme not in SCHEMES:
        raise InvalidField("scheme", scheme, ", ".join(SCHEMES))
    if out.exists():
        raise InvalidField("out", str(out), "a directory that does not exist yet")
    if read_quantization(source) != QuantizationConfig():
        raise ModelError(f"{source}: is quantised already; allowed: a model of float32, float16 or bfloat16")
    chosen, files = SCHEMES[scheme], checkpoint_files(source)
    _check_tensors(files, chosen)
    try:
        out.mkdir(parents=True)
    except OSError as error:
        raise ModelError(f"{out}: cannot be written: {error.strerror}") from error
    try:
        yield from _write(source, out, chosen, files)
    except BaseException as error:
        shutil.rmtree(out, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise ModelError(f"{out}: cannot be written: {error}") from error
        raise


def _write(source: Path, out: Path, chosen: QuantizationScheme, files: list[Path]) -> Iterator[WrittenTensor]:
    config = read_config(source)
    plan = ShardPlan.of(config, RankCoordinates())
    placement = Placement(choose(CPU), CPU, torch.float32, plan, quantization=QuantizationConfig(chosen.method))
    file_of: dict[str, str] = {}  # name of each tensor's file
    dense_ends = {"lm_head"}
    for file in files:
        tensors: dict[str, Tensor] = {}
        with safe_open(file, framework="pt", device="cpu") as stored:
            for source_name in stored.keys():  # noqa: SIM118 – no mapping
                for name, dense in _matrices(source_name, stored.get_tensor(source_name), config.architecture):
                    written, error = {name: dense}, None
                    if LINEAR.search(name):
                        rows, columns = (Slice.whole(size) for size in dense.shape)
                        written, error = _quantize(name, dense, Linear(columns, {"": rows}, placement))
                    elif dense.ndim == 2 and (found := IN_LAYER.fullmatch(name)):
                        dense_ends.add(f"re:.*{re.escape(found[1])}$")
                    tensors |= written
                    yield WrittenTensor(name, error, source_name)
        save_file(tensors, out / file.name, {"format": "pt"})
        shutil.copymode(file, out / file.name)  # safetensors lets only the owner read its files
        file_of |= dict.fromkeys(tensors, file.name)
    if len(files) > 1:
        total = sum((out / file.name).stat().st_size for file in files)
        _write_json(out / INDEX, {"metadata": {"total_size": total}, "weight_map": file_of})
    for path in (*source.iterdir(), *source.glob("*/*.jinja")):  # chat templates may be in a folder
        has_weights = path.suffix in WEIGHT_SUFFIXES or path.name.endswith(".index.json")
        if path.is_file() and not has_weights and path.name != "config.json":
            copy = out / path.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copy(path, copy)
    values = json.loads((source / "config.json").read_text(encoding="utf-8"))
    _write_json(out / "config.json", values | {"quantization_config": _config(chosen, sorted(dense_ends))})


def _matrices(name: str, tensor: Tensor, architecture: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensor, or each matrix that it stacks, with its name in unstacked checkpoints."""
    found, mixtral = STACKED.fullmatch(name), architecture.startswith("Mixtral")
    if found is None:
        yield mixtral_name(name) if mixtral else name, tensor
        return
    parts = _parts(found)
    for expert, stack in enumerate(tensor):
        for part, matrix in zip(parts, stack.chunk(len(parts)), strict=True):
            own = f"{found[1]}{expert}.{part}.weight"
            yield mixtral_name(own) if mixtral else own, matrix


def _parts(stacked: re.Match[str]) -> tuple[str, ...]:
    return ("gate_proj", "up_proj") if stacked[2] == "gate_up" else ("down_proj",)


def _check_tensors(files: list[Path], scheme: QuantizationScheme) -> None:
    """Raise ModelError for a matrix that cannot be rounded, by its dtype or its shape."""
    for file in files:
        with safe_open(file, framework="pt", device="cpu") as stored:
            for name in stored.keys():  # noqa: SIM118 – no mapping
                tensor = stored.get_slice(name)
                shape, dtype = tensor.get_shape(), tensor.get_dtype()
                found = STACKED.fullmatch(name)
                if found is None and not LINEAR.search(name):
                    continue
                if len(shape) != (axes := 2 if found is None else 3):
                    raise ModelError(f"{name}: has shape {shape}; allowed: {axes} axes")
                if found is not None:
                    shape = [shape[1] // len(_parts(found)), shape[2]]
                if dtype not in FLOATS:
                    raise ModelError(f"{name}: is stored as {dtype}; allowed: {', '.join(FLOATS)}")
                if any(size % multiple for size, multiple in zip(shape, scheme.multiples, strict=True)):
                    raise ModelError(f"{name}: is {shape}; allowed: multiples of {list(scheme.multiples)}")


def _quantize(name: str, dense: Tensor, linear: Linear) -> tuple[dict[str, Tensor], float]:
    """Return a matrix's tensors in the format of `linear`, by name, and their relative error once loaded."""
    if not dense.isfinite().all():
        raise ModelError(f"{name}: {NOT_FINITE}")
    start = name.removesuffix("weight")
    tensors = {end: tensor.contiguous() for end, tensor in linear.method.quantize(dense).items()}
    for end, target in linear.targets():
        target.fill(target.part_of(tensors[end.removeprefix(".")]))
    exact = dense.float()
    difference, norm = linear.method.dense_weight(linear) - exact, torch.linalg.vector_norm(exact)
    error = torch.linalg.vector_norm(difference) / norm.clamp(min=torch.finfo(norm.dtype).tiny)
    if isinstance(linear.method, PackQuantizedMethod):
        tensors["weight_shape"] = torch.tensor(dense.shape)
    return {f"{start}{end}": tensor for end, tensor in tensors.items()}, error.item()


def _config(scheme: QuantizationScheme, ignore: list[str]) -> dict[str, object]:
    group = {"targets": ["Linear"], "weights": scheme.weights, "input_activations": scheme.inputs}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": scheme.tensor_format,
        "config_groups": {"group_0": {**group, "output_activations": None, "format": scheme.tensor_format}},
        "ignore": ignore,
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

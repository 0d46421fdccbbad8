"""Write a dense checkpoint with its linear layers rounded to fewer bits, in the format of compressed-tensors."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tok_core.config import RankCoordinates
from tok_core.errors import InvalidField, ModelError
from tok_core.model_config import read_config
from tok_core.models.layers import Linear, Placement
from tok_core.models.weights.loading import INDEX, checkpoint_files, mixtral_name
from tok_core.parallel import ShardPlan, Slice
from tok_core.quantization import LinearMethod, PackQuantizedMethod, QuantizationConfig, ScaledMethod, read_quantization
from tok_kernels import choose

# The linear layers of all supported families but the LM head and routers, and matrices of all experts in one tensor.
LINEAR = re.compile(r"layers\.\d+\..*(_proj|\.experts\.\d+\.w[123])\.weight$")
STACKED = re.compile(r"(.*layers\.\d+\.mlp\.experts\.)(gate_up|down)_proj$")
IN_LAYER = re.compile(r".*layers\.\d+\.(.+)\.weight$")
CPU, FLOAT8, BLOCK = torch.device("cpu"), torch.float8_e4m3fn, (128, 128)
TOKENS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}


@dataclass(frozen=True, slots=True)
class RoundingScheme:
    """A weight format, and how compressed-tensors names it: the format, and the arguments of weights and inputs.

    multiples  numbers that a matrix's rows and columns must be multiples of
    """

    multiples: tuple[int, int]
    method: LinearMethod
    form: str
    weights: Mapping[str, object]
    inputs: Mapping[str, object] | None


@dataclass(frozen=True, slots=True)
class RoundedTensor:
    """A tensor that has been written.

    error   length of the difference, relative to the length of the tensor; None: the tensor is written as it was
    source  name of the tensor that it was, or a part of, in the dense checkpoint
    """

    name: str
    error: float | None
    source: str


def _int4(group: int) -> RoundingScheme:
    """Return the scheme of four bits with a scale for each `group` columns."""
    method = PackQuantizedMethod(bits=4, group=group)
    weights = {**WEIGHTS, "num_bits": 4, "type": "int", "strategy": "group", "group_size": group}
    return RoundingScheme((1, group), method, "pack-quantized", weights, None)


SCHEMES: Mapping[str, RoundingScheme] = MappingProxyType(
    {
        "fp8-dynamic": RoundingScheme(
            (1, 1), ScaledMethod(FLOAT8), "float-quantized", {**WEIGHTS, "strategy": "channel"}, TOKENS
        ),
        "fp8-block": RoundingScheme(
            BLOCK,
            ScaledMethod(FLOAT8, block=BLOCK),
            "float-quantized",
            {**WEIGHTS, "strategy": "block", "block_structure": list(BLOCK)},
            {**TOKENS, "strategy": "group", "group_size": BLOCK[1]},
        ),
        "int4-g128": _int4(128),
        "int4-g64": _int4(64),
    }
)


def round_checkpoint(source: Path, out: Path, scheme: str) -> Iterator[RoundedTensor]:
    """Write the model in directory `source` to the new directory `out`, each linear layer rounded to the nearest.

    Embedding, LM head, norms and routers stay as they are. Experts get a tensor for each matrix, by the names of
    Mixtral's and Qwen's checkpoints, also where the dense checkpoint stacks them. Yields each tensor once it is
    rounded; a file is written when all its tensors are, and config.json last. One file of tensors is in memory at a
    time.
    Errors: InvalidField for an unknown scheme or an `out` that exists; ModelError for a model that cannot be read or
    is quantised already, and for columns that the scheme cannot divide.
    """
    if scheme not in SCHEMES:
        raise InvalidField("scheme", scheme, ", ".join(SCHEMES))
    if out.exists():
        raise InvalidField("out", str(out), "a directory that does not exist yet")
    if read_quantization(source) != QuantizationConfig():
        raise ModelError(f"{source}: is quantised already; allowed: a model of float32, float16 or bfloat16")
    chosen, files, config = SCHEMES[scheme], checkpoint_files(source), read_config(source)
    plan = ShardPlan.of(config, RankCoordinates())
    placement = Placement(choose(CPU), CPU, torch.float32, plan, quantization=QuantizationConfig(chosen.method))
    _check_sizes(files, chosen)
    out.mkdir(parents=True)
    where: dict[str, str] = {}
    dense_ends = {"lm_head"}
    for file in files:
        tensors: dict[str, Tensor] = {}
        with safe_open(file, framework="pt", device="cpu") as stored:
            for source_name in stored.keys():  # noqa: SIM118 – no mapping
                for name, dense in _matrices(source_name, stored.get_tensor(source_name), config.architecture):
                    rounded, error = {name: dense}, None
                    if LINEAR.search(name):
                        rows, columns = (Slice.whole(size) for size in dense.shape)
                        rounded, error = _round(name, dense, Linear(columns, {"": rows}, placement))
                    elif dense.ndim == 2 and (found := IN_LAYER.fullmatch(name)):
                        dense_ends.add(f"re:.*{re.escape(found[1])}$")
                    tensors |= rounded
                    yield RoundedTensor(name, error, source_name)
        save_file(tensors, out / file.name, {"format": "pt"})
        where |= dict.fromkeys(tensors, file.name)
    if len(files) > 1:
        total = sum((out / file.name).stat().st_size for file in files)
        _write_json(out / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and path.name not in (INDEX, "config.json"):
            shutil.copy(path, out)
    values = json.loads((source / "config.json").read_text(encoding="utf-8"))
    _write_json(out / "config.json", values | {"quantization_config": _config(chosen, sorted(dense_ends))})


def _matrices(name: str, tensor: Tensor, architecture: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensor, or the matrices that it stacks, by their names in the model's usual checkpoints."""
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


def _check_sizes(files: list[Path], scheme: RoundingScheme) -> None:
    for file in files:
        with safe_open(file, framework="pt", device="cpu") as stored:
            for name in stored.keys():  # noqa: SIM118 – no mapping
                shape = stored.get_slice(name).get_shape()
                if found := STACKED.fullmatch(name):
                    shape = [shape[1] // len(_parts(found)), shape[2]]
                elif not LINEAR.search(name):
                    continue
                if any(size % multiple for size, multiple in zip(shape, scheme.multiples, strict=True)):
                    raise ModelError(f"{name}: is {shape}; allowed: multiples of {list(scheme.multiples)}")


def _round(name: str, dense: Tensor, linear: Linear) -> tuple[dict[str, Tensor], float]:
    """Return a matrix's tensors in the format of `linear`, by their names, and their relative error once loaded."""
    start = name.removesuffix("weight")
    tensors = {end: tensor.contiguous() for end, tensor in linear.method.quantize(dense).items()}
    for end, target in linear.targets():
        target.fill(target.part_of(tensors[end.removeprefix(".")]))
    exact = dense.float()
    error = torch.linalg.vector_norm(linear.method.dense_weight(linear) - exact) / torch.linalg.vector_norm(exact)
    if isinstance(linear.method, PackQuantizedMethod):
        tensors["weight_shape"] = torch.tensor(dense.shape)
    return {f"{start}{end}": tensor for end, tensor in tensors.items()}, error.item()


def _config(scheme: RoundingScheme, ignore: list[str]) -> dict[str, object]:
    group = {"targets": ["Linear"], "weights": scheme.weights, "input_activations": scheme.inputs}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": scheme.form,
        "config_groups": {"group_0": {**group, "output_activations": None, "format": scheme.form}},
        "ignore": ignore,
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

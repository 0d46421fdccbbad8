"""Write tiny models in the weight formats of other libraries, and the dense models that equal them.

Tensors are written as the formats define them, by code that shares nothing with the code under test.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.tiny_models import change_weights, make_model
from tok_core.config import Quantization

Ints = NDArray[np.int64]
# Names of cases -> words of --quantization that round a dense model while loading.
ROUNDED: dict[str, Quantization] = {"--quantization fp8": "fp8", "--quantization int8": "int8"}
Make = Callable[[int, int, np.random.Generator], tuple[dict[str, Tensor], Tensor]]
BLOCK = (16, 32)
GROUP = 32
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of a word's eight, from its lowest bits up


@dataclass(frozen=True)
class Scheme:
    """`quantization_config`, and the stored tensors and the dense matrix of a random matrix of a shape."""

    config: Mapping[str, object]
    make: Make


def words(values: Ints, bits: int, columns: tuple[int, ...] | None = None) -> Tensor:
    """Pack the last axis into 32-bit words: value `columns[i]` of each word's at bit `bits · i`."""
    per_word = 32 // bits
    padded = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % per_word)])
    parts = padded.reshape(*padded.shape[:-1], -1, per_word)
    word = sum(parts[..., column] << (bits * place) for place, column in enumerate(columns or range(per_word)))
    return torch.from_numpy(np.asarray(word).astype(np.uint32).view(np.int32))


def fp8_rows(rows: int, columns: int, rng: np.random.Generator) -> tuple[dict[str, Tensor], Tensor]:
    weight, scale = _fp8(rows, columns, rng), _scales(rng, rows, 1)
    return {"weight": weight, "weight_scale": scale}, weight.float() * scale


def fp8_matrix(rows: int, columns: int, rng: np.random.Generator) -> tuple[dict[str, Tensor], Tensor]:
    weight, scale = _fp8(rows, columns, rng), _scales(rng, 1)
    stored = {"weight": weight, "weight_scale": scale, "input_scale": torch.tensor([0.7])}
    return stored, weight.float() * scale


def fp8_scalar(rows: int, columns: int, rng: np.random.Generator) -> tuple[dict[str, Tensor], Tensor]:
    stored, dense = fp8_matrix(rows, columns, rng)
    return stored | {"weight_scale": stored["weight_scale"][0]}, dense


def fp8_blocks(name: str) -> Make:
    def make(rows: int, columns: int, rng: np.random.Generator) -> tuple[dict[str, Tensor], Tensor]:
        weight, scale = _fp8(rows, columns, rng), _scales(rng, -(-rows // BLOCK[0]), -(-columns // BLOCK[1]))
        dense = weight.float()
        for row in range(scale.shape[0]):
            for column in range(scale.shape[1]):
                block = slice(row * BLOCK[0], (row + 1) * BLOCK[0]), slice(column * BLOCK[1], (column + 1) * BLOCK[1])
                dense[block] *= scale[row, column]
        return {"weight": weight, name: scale}, dense

    return make


def int8_rows(rows: int, columns: int, rng: np.random.Generator) -> tuple[dict[str, Tensor], Tensor]:
    weight = torch.from_numpy(rng.integers(-128, 128, (rows, columns)).astype(np.int8))
    scale = _scales(rng, rows, 1, bits=8)
    return {"weight": weight, "weight_scale": scale}, weight.float() * scale


def packed(
    layout: str, bits: int = 4, group: int | None = GROUP, *, zeros: bool = True, ordered: bool = False, offset: int = 1
) -> Make:
    """Return the maker of a layout: "compressed-tensors", "gptq" or "awq"; all 4-bit values occur."""

    def make(rows: int, columns: int, rng: np.random.Generator) -> tuple[dict[str, Tensor], Tensor]:
        size = group or columns
        q = rng.integers(0, 1 << bits, (rows, columns))
        groups = -(-columns // size)
        scale = _scales(rng, rows, groups, bits=bits).half().float()
        zero = rng.integers(1, 1 << bits, (rows, groups)) if zeros else np.full((rows, groups), 1 << (bits - 1))
        of_column = np.arange(columns) // size
        if ordered:
            of_column = rng.permutation(of_column)
        dense = torch.from_numpy((q - zero[:, of_column]).astype(np.float32)) * scale[:, of_column]
        if layout == "compressed-tensors":
            stored = {
                "weight_packed": words(q, bits),
                "weight_scale": scale,
                "weight_shape": torch.tensor([rows, columns]),
            }
            if zeros:
                stored["weight_zero_point"] = words(zero.T, bits).T
        elif layout == "gptq":
            stored = {"qweight": words(q, bits).T, "qzeros": words(zero.T - offset, bits), "scales": scale.T.half()}
            stored["g_idx"] = torch.from_numpy(of_column.astype(np.int32))
        else:
            stored = {"qweight": words(q.T, 4, AWQ_COLUMNS), "qzeros": words(zero.T, 4, AWQ_COLUMNS)}
            stored["scales"] = scale.T.half()
        return {name: tensor.contiguous() for name, tensor in stored.items()}, dense

    return make


def _fp8(rows: int, columns: int, rng: np.random.Generator) -> Tensor:
    return torch.from_numpy(rng.standard_normal((rows, columns)).astype(np.float32) * 50).to(torch.float8_e4m3fn)


def _scales(rng: np.random.Generator, *shape: int, bits: int = 0) -> Tensor:
    """Random scales by which weights have a standard deviation of about 0.1; `bits` 0: for values around ±50."""
    unit = 0.1 * 2 / (1 << (bits - 1)) if bits else 0.1 / 50
    return torch.from_numpy(rng.uniform(0.5, 1.5, shape).astype(np.float32)) * unit


def of_linears(weights: dict[str, object], inputs: dict[str, object] | None, form: str) -> dict[str, object]:
    """Return a `quantization_config` of compressed-tensors for all linear layers but the LM head."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


TOKENS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
FLOATS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
KV_CACHE = FLOATS | {"strategy": "tensor"}
INTS = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}
FOUR = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "dynamic": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False, "lm_head": False}
BY_BLOCK = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": list(BLOCK)}
STRUCTURE = {"strategy": "block", "block_structure": list(BLOCK)}
SCHEMES: dict[str, Scheme] = {
    "fp8-dynamic": Scheme(of_linears(FLOATS | {"strategy": "channel"}, TOKENS, "float-quantized"), fp8_rows),
    "fp8-static": Scheme(of_linears(FLOATS | {"strategy": "tensor"}, FLOATS, "float-quantized"), fp8_matrix),
    "fp8-block": Scheme(of_linears(FLOATS | STRUCTURE, TOKENS, "float-quantized"), fp8_blocks("weight_scale")),
    "fine-grained-fp8": Scheme(BY_BLOCK, fp8_blocks("weight_scale_inv")),
    "fp8-per-matrix": Scheme({"quant_method": "fp8", "activation_scheme": "static"}, fp8_scalar),
    "fbgemm-fp8": Scheme({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fp8_rows),
    "int8": Scheme(of_linears(INTS | {"strategy": "channel"}, INTS | TOKENS, "int-quantized"), int8_rows),
    "int4": Scheme(
        of_linears(FOUR | {"symmetric": True}, None, "pack-quantized"), packed("compressed-tensors", zeros=False)
    ),
    "int4-zero-points": Scheme(
        of_linears(FOUR | {"symmetric": False, "actorder": "weight"}, None, "pack-quantized"),
        packed("compressed-tensors"),
    ),
    "int8-rows-packed": Scheme(
        of_linears(INTS | {"strategy": "channel"}, None, "pack-quantized"),
        packed("compressed-tensors", 8, None, zeros=False),
    ),
    "awq": Scheme(AWQ, packed("awq")),
    "gptq": Scheme(GPTQ, packed("gptq")),
    "gptq-desc-act": Scheme(GPTQ | {"desc_act": True}, packed("gptq", ordered=True)),
    "gptq-8-bit": Scheme(GPTQ | {"bits": 8, "group_size": -1, "sym": True}, packed("gptq", 8, None)),
    "gptq-v2": Scheme(GPTQ | {"checkpoint_format": "gptq_v2"}, packed("gptq", offset=0)),
}


def write_rounded(kind: str, directory: Path, name: str) -> tuple[Path, Path]:
    """Write a dense model of three layers, and the one whose linear layers are rounded as a key of ROUNDED says."""
    path, rounded = (make_model(kind, directory / f"{name}{end}", layers=3) for end in ("", "-rounded"))
    limit = 448 if ROUNDED[name] == "fp8" else 127

    def round_rows(weights: dict[str, Tensor]) -> None:
        for key in [key for key in weights if key.endswith("_proj.weight")]:
            scale = weights[key].abs().amax(1, keepdim=True) / limit
            divided = weights[key] / scale
            whole = divided.to(torch.float8_e4m3fn).float() if ROUNDED[name] == "fp8" else divided.round()
            weights[key] = whole * scale

    return path, change_weights(rounded, round_rows)


def write_quantized(
    kind: str, directory: Path, scheme: str, dense: tuple[str, ...] = (), others: Mapping[str, Make] | None = None
) -> tuple[Path, Path]:
    """Write a model of three layers in a scheme and the dense model that equals it; return their directories.

    Layers whose names contain one of `dense` stay dense, and those whose names contain a key of `others` are made by
    its value; `quantization_config` does not say so.
    """
    made = SCHEMES[scheme]
    quantised, equal = (make_model(kind, directory / name, layers=3) for name in (scheme, f"{scheme}-dense"))
    stored, rng = load_file(quantised / "model.safetensors"), np.random.default_rng(0)
    dequantised = dict(stored)
    for name in sorted(stored):
        if name.endswith("_proj.weight") and not any(part in name for part in dense):
            rows, columns = stored.pop(name).shape
            make = next((other for part, other in (others or {}).items() if part in name), made.make)
            tensors, dequantised[name] = make(rows, columns, rng)
            stored |= {f"{name.removesuffix('weight')}{end}": tensor for end, tensor in tensors.items()}
    save_file(stored, quantised / "model.safetensors")
    save_file(dequantised, equal / "model.safetensors")
    config = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps(config | {"quantization_config": dict(made.config)}))
    return quantised, equal


def write_kv_scales(path: Path, scales: Tensor, names: tuple[str, str] = ("k_scale", "v_scale")) -> Path:
    """Add scales of cached keys and values, `[layers, 2]` or `[layers, 2, heads]`, to a model; return its directory.

    `names` are those of compressed-tensors for the scales of keys and of values, below `self_attn`.
    """
    stored = load_file(path / "model.safetensors")
    for layer, pair in enumerate(scales):
        for name, scale in zip(names, pair, strict=True):
            shape = (-1, 1, 1) if scales.ndim > 2 else (1,)
            stored[f"model.layers.{layer}.self_attn.{name}"] = scale.reshape(shape).clone()
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    quantization = config.get("quantization_config") or {"quant_method": "compressed-tensors", "config_groups": {}}
    quantization["kv_cache_scheme"] = KV_CACHE | {"strategy": "attn_head" if scales.ndim > 2 else "tensor"}
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return path

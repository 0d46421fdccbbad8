"""Read the weight formats of a checkpoint from `quantization_config` in its config.json.

A key or a value that would change results and is not computed is refused by its name. What a format says of the inputs
of linear layers is not used: backends round them by each token's own largest value, or not at all, which is closer to
the unquantised model than scales that were fixed before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from tok_core.config import Quantization
from tok_core.errors import InvalidField, ModelError
from tok_core.model_config import Fields
from tok_core.quantization.dense import DENSE
from tok_core.quantization.linear_method import LinearMethod
from tok_core.quantization.packed_layouts import AWQMethod, GPTQMethod, PackQuantizedMethod
from tok_core.quantization.quantization_config import KVScaleUnit, QuantizationConfig
from tok_core.quantization.scaled_method import ScaledMethod

FP8 = torch.float8_e4m3fn
ONLINE: Mapping[str, LinearMethod] = MappingProxyType({"fp8": ScaledMethod(FP8), "int8": ScaledMethod(torch.int8)})
DENSE_HEAD = ("lm_head",)  # formats of other libraries leave it dense
DENSE_ROUTER = ("mlp.gate", "mlp.shared_expert_gate")  # of mixtures of experts
LINEAR = "Linear"  # compressed-tensors' word for all linear layers
ALL_COLUMNS = -1  # as group_size
# Keys that say how a checkpoint was made, or choose kernels of other libraries.
NOTES = frozenset(
    {
        *("quant_method", "quantization_status", "global_compression_ratio", "version", "meta", "quantizer", "dataset"),
        *(
            "tokenizer",
            "model_name_or_path",
            "model_file_base_name",
            "damp_percent",
            "true_sequential",
            "static_groups",
        ),
        *("act_group_aware", "observer", "observer_kwargs", "model_seqlen", "batch_size", "pad_token_id", "max_length"),
        *("max_input_length", "cache_block_outputs", "block_name_to_quantize", "module_name_preceding_first_block"),
        *("backend", "use_exllama", "exllama_config", "disable_exllama", "use_cuda_fp16", "do_fuse", "modules_to_fuse"),
        *("fuse_max_seq_len", "is_marlin_format", "pack_dtype", "scale_dtype", "zp_dtype"),
    }
)


def read_quantization(path: Path, requested: Quantization = "auto") -> QuantizationConfig:
    """Return the weight format of each linear layer of the model in directory `path`, as `requested`.

    Raises ModelError, which names key and value, for a format that is not supported, and InvalidField if the
    checkpoint's format is not the one requested.
    """
    model = Fields.of_file(path / "config.json")
    config = model.section("quantization_config")
    if config is None:
        if requested == "auto":
            return QuantizationConfig()
        if requested not in ONLINE:
            allowed = f"auto, {', '.join(ONLINE)}, since the checkpoint is not quantised"
            raise InvalidField("quantization", requested, allowed)
        dense = (*DENSE_HEAD, *DENSE_ROUTER) if "num_experts_per_tok" in model else DENSE_HEAD
        return QuantizationConfig(ONLINE[requested], dense, online=True)
    name = config.text("quant_method")
    if name not in READERS:
        raise config.wrong("quant_method", name, ", ".join(READERS))
    if requested not in ("auto", name):
        raise InvalidField("quantization", requested, f"auto, {name}, since the checkpoint is quantised so")
    return READERS[name](config)


def _read_fp8(config: Fields) -> QuantizationConfig:
    """Read "fp8": blocks with scales (DeepSeek-V3, Qwen3), or one scale for each matrix."""
    _check(
        config,
        ("activation_scheme", "weight_block_size", "modules_to_not_convert", "ignored_layers"),
        {
            "fmt": ("e4m3",),
            "scale_fmt": ("float",),
            "dequantize": (False,),
            "kv_cache_scheme": ("static",),
            "modules_to_convert": ([],),
        },
    )
    scheme = config.text("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise config.wrong("activation_scheme", scheme, "dynamic, static")
    redundant = ("input_scale",) if scheme == "static" else ()
    ignored = *DENSE_HEAD, *_layers(config, "modules_to_not_convert"), *_layers(config, "ignored_layers")
    if "weight_block_size" in config:
        block = _block(config, "weight_block_size")
        method = ScaledMethod(FP8, block=block, scale_name="weight_scale_inv", redundant=redundant)
    else:
        method = ScaledMethod(FP8, per_matrix=True, redundant=redundant)
    return QuantizationConfig(method, ignored, kv_scales="layer" if "kv_cache_scheme" in config else None)


def _read_fbgemm_fp8(config: Fields) -> QuantizationConfig:
    """Read "fbgemm_fp8" (Meta): a scale for each row."""
    _check(config, ("activation_scale_ub", "modules_to_not_convert"), {})
    method = ScaledMethod(FP8, redundant=("input_scale_ub",))
    return QuantizationConfig(method, (*DENSE_HEAD, *_layers(config, "modules_to_not_convert")))


def _read_awq(config: Fields) -> QuantizationConfig:
    _check(
        config,
        ("bits", "w_bit", "group_size", "q_group_size", "zero_point", "modules_to_not_convert"),
        {"version": ("gemm", "GEMM"), "format": ("gemm",)},
    )
    for key in ("bits", "w_bit"):
        if config.integer(key, 4) != 4:
            raise config.wrong(key, config.values[key], "4")
    if not config.flag("zero_point", True):
        raise config.wrong("zero_point", False, "true")
    group = _group(config, "group_size" if "group_size" in config else "q_group_size")
    return QuantizationConfig(AWQMethod(group=group), (*DENSE_HEAD, *_layers(config, "modules_to_not_convert")))


def _read_gptq(config: Fields) -> QuantizationConfig:
    _check(
        config,
        ("bits", "group_size", "desc_act", "sym", "checkpoint_format", "format", "lm_head"),
        {"dynamic": ({},), "modules_in_block_to_quantize": (), "lm_head": (False,)},
    )
    bits = config.integer("bits")
    if bits not in (4, 8):
        raise config.wrong("bits", bits, "4, 8")
    form = config.text("checkpoint_format", config.text("format", "gptq"))
    if form not in ("gptq", "gptq_v2"):
        raise config.wrong("checkpoint_format", form, "gptq, gptq_v2")
    method = GPTQMethod(
        bits=bits,
        group=_group(config, "group_size"),
        ordered=config.flag("desc_act"),
        offset=1 if form == "gptq" else 0,
    )
    return QuantizationConfig(method, DENSE_HEAD)


def _read_compressed_tensors(config: Fields) -> QuantizationConfig:
    """Read "compressed-tensors": groups of layers, each with a format."""
    _check(
        config,
        ("config_groups", "format", "ignore", "kv_cache_scheme"),
        {"sparsity_config": ({},), "transform_config": ({},), "moe_sparsity_config": ()},
    )
    groups, kv_scales = config.section("config_groups") or Fields(config.origin, {}), _kv_scales(config)
    if not groups.values and kv_scales is None:
        raise config.wrong("config_groups", None, "a JSON object with at least one group")
    everything: LinearMethod = DENSE
    special: list[tuple[str, LinearMethod]] = []
    for name in groups.values:
        group = groups.section(name)
        assert group is not None, "values of null are left out"
        method = _group_method(group, group.text("format", config.text("format", "")))
        found = _layers(group, "targets")
        if not found:
            raise group.wrong("targets", group.values.get("targets"), "a list with at least one layer")
        for target in found:
            if target == LINEAR:
                everything = method
            else:
                special.append((target, method))
    special.sort(key=lambda entry: entry[0].startswith("re:"))  # names take precedence over expressions
    return QuantizationConfig(everything, tuple(_layers(config, "ignore")), tuple(special), kv_scales=kv_scales)


def _kv_scales(config: Fields) -> KVScaleUnit | None:
    """Return which cached keys or values share a scale: compressed-tensors stores scales that calibration has found."""
    scheme = config.section("kv_cache_scheme")
    if scheme is None:
        return None
    allowed = {"num_bits": (8,), "type": ("float",), "dynamic": (False,), "symmetric": (True,), "actorder": (False,)}
    _check(scheme, ARGUMENTS, allowed)
    if "type" not in scheme:
        raise scheme.wrong("type", None, "float")
    strategy = scheme.text("strategy", "tensor")
    if strategy not in KV_SCALE_UNITS:
        raise scheme.wrong("strategy", strategy, ", ".join(KV_SCALE_UNITS))
    return KV_SCALE_UNITS[strategy]


def _group_method(group: Fields, form: str) -> LinearMethod:
    """Return the weight format of one group of compressed-tensors; `form` names how its tensors are stored."""
    _check(group, ("targets", "weights", "input_activations", "format"), {"output_activations": ()})
    weights = group.section("weights")
    if weights is None:
        raise group.wrong("weights", None, "a JSON object")
    if form not in FORMATS:
        raise group.wrong("format", form, ", ".join(FORMATS))
    _check(weights, ARGUMENTS, {"dynamic": (False,), "actorder": (False, "weight", "static")})
    bits, kind = weights.integer("num_bits", 8), weights.text("type", "int")
    strategy = weights.text("strategy", "tensor")
    found = {"type": kind, "num_bits": bits, "strategy": strategy}
    for (key, value), allowed in zip(found.items(), FORMATS[form], strict=True):
        if value not in allowed:
            raise weights.wrong(key, value, f"{', '.join(map(str, allowed))}, with format {form}")
    _check_inputs(group)
    symmetric = weights.flag("symmetric", True)
    if form == "pack-quantized":
        columns = _group(weights, "group_size") if strategy == "group" else None
        return PackQuantizedMethod(bits=bits, group=columns, zero_points=not symmetric)
    if not symmetric:
        raise weights.wrong("symmetric", False, f"true, with format {form}")
    return ScaledMethod(
        FP8 if kind == "float" else torch.int8,
        block=_block(weights, "block_structure") if strategy == "block" else None,
        per_matrix=strategy == "tensor",
        redundant=("input_scale", "input_zero_point", "weight_zero_point"),
    )


def _check_inputs(group: Fields) -> None:
    """Raise ModelError for unknown arguments of input quantisation."""
    inputs = group.section("input_activations")
    if inputs is None:
        return
    _check(inputs, ARGUMENTS, {"actorder": (False,), "dynamic": (True, False), "num_bits": (8,)})
    strategy = inputs.text("strategy", "tensor")
    if strategy not in ("token", "tensor", "group"):
        raise inputs.wrong("strategy", strategy, "token, tensor, group")


def _check(fields: Fields, read: Collection[str], allowed: Mapping[str, tuple[object, ...]]) -> None:
    """Raise ModelError for a key that is unknown, or whose value is not among those allowed — none: null only."""
    for key, value in fields.values.items():
        if key in allowed:
            if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed[key]):
                raise fields.wrong(key, value, " or ".join(map(json.dumps, allowed[key])) or "null")
        elif key not in read and key not in NOTES:
            raise ModelError(f"{fields.origin}: {key} is not known; allowed: {', '.join(sorted({*read, *allowed}))}")


def _layers(fields: Fields, key: str) -> list[str]:
    """Return a list of layers as `QuantizationConfig` matches them; empty if the key is absent."""
    entries = fields.texts(key)
    for entry in entries:
        if entry.startswith("re:"):
            try:
                re.compile(entry.removeprefix("re:"))
            except re.error as error:
                raise fields.wrong(key, entry, f"re: and a regular expression ({error})") from None
    return entries


def _group(fields: Fields, key: str) -> int | None:
    """Return the number of columns that share a scale; None: all."""
    size = fields.integer(key, 128, minimum=ALL_COLUMNS)
    if size == 0:
        raise fields.wrong(key, size, "-1 or a positive integer")
    return None if size == ALL_COLUMNS else size


def _block(fields: Fields, key: str) -> tuple[int, int]:
    """Return rows and columns of a block, as a list of two numbers or as "128x128"."""
    value = fields.values.get(key)
    sizes: object = value.split("x") if isinstance(value, str) else value
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(str(size).isdecimal() and int(size) for size in sizes):
        raise fields.wrong(key, value, "a list of two positive integers")
    return int(sizes[0]), int(sizes[1])


# The arguments that compressed-tensors gives for weights and for inputs.
ARGUMENTS = ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic", "actorder")
# Strategies of `kv_cache_scheme`.
KV_SCALE_UNITS: Mapping[str, KVScaleUnit] = MappingProxyType({"tensor": "layer", "attn_head": "head"})
# For each way of storing tensors: types, numbers of bits and strategies.
FORMATS: Mapping[str, tuple[tuple[str, ...], tuple[int, ...], tuple[str, ...]]] = MappingProxyType(
    {
        "float-quantized": (("float",), (8,), ("tensor", "channel", "block")),
        "int-quantized": (("int",), (8,), ("tensor", "channel")),
        "naive-quantized": (("float", "int"), (8,), ("tensor", "channel", "block")),
        "pack-quantized": (("int",), (4, 8), ("channel", "group")),
    }
)
READERS: Mapping[str, Callable[[Fields], QuantizationConfig]] = MappingProxyType(
    {
        "fp8": _read_fp8,
        "fbgemm_fp8": _read_fbgemm_fp8,
        "compressed-tensors": _read_compressed_tensors,
        "awq": _read_awq,
        "gptq": _read_gptq,
    }
)

"""Read the weight formats of a checkpoint from `quantization_config` in its config.json.

An unsupported key or value that would change results is refused by its name. Settings for the activations of linear
layers are ignored. Backends quantise activations dynamically, by each token's largest value, or not at all. Either is
closer to the unquantised model than static scales.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
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
ALL_COLUMNS = -1  # value of group_size: one scale for all columns of a row
# Keys that say how a checkpoint was made, or choose kernels of other libraries.
IGNORED_KEYS = frozenset(
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
        *("hyb_act", "act_group_aware"),  # one setting, whose name GPTQModel has changed
        *("observer", "observer_kwargs", "model_seqlen", "batch_size", "pad_token_id", "max_length"),
        *("max_input_length", "cache_block_outputs", "block_name_to_quantize", "module_name_preceding_first_block"),
        *("backend", "use_exllama", "exllama_config", "disable_exllama", "use_cuda_fp16", "do_fuse", "modules_to_fuse"),
        *("fuse_max_seq_len", "is_marlin_format", "pack_dtype", "scale_dtype", "zp_dtype"),
        *("provider", "autoround_version", "iters", "nsamples", "seqlen", "lr", "minmax_lr", "amp"),
        *("enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input", "gradient_accumulate_steps"),
        "low_gpu_mem_usage",
    }
)


def read_quantization(path: Path, requested: Quantization = "auto") -> QuantizationConfig:
    """Return the weight format of each linear layer of the model in directory `path`, as `requested`.

    Raises ModelError, which names key and value, for a format that is not supported, and InvalidField if the
    checkpoint's format is not the one requested.
    """
    model = Fields.of_file(path / "config.json")
    config = model.section("quantization_config")
    routers = DENSE_ROUTER if "num_experts_per_tok" in model else ()
    if config is None:
        _check_modelopt(path / "hf_quant_config.json")
        if requested == "auto":
            return QuantizationConfig()
        if requested not in ONLINE:
            allowed = f"auto, {', '.join(ONLINE)}, since the checkpoint is not quantised"
            raise InvalidField("quantization", requested, allowed)
        return QuantizationConfig(ONLINE[requested], (*DENSE_HEAD, *routers), online=True)
    name = config.text("quant_method")
    if name not in READERS:
        raise config.wrong("quant_method", name, ", ".join(READERS))
    if requested not in ("auto", name):
        raise InvalidField("quantization", requested, f"auto, {name}, since the checkpoint is quantised so")
    if name == "gptq" and _is_mixtral(model) and config.values.get("dynamic"):
        allowed = "{} for Mixtral, whose matrices have other names in checkpoints than in the model"
        raise config.wrong("dynamic", config.values["dynamic"], allowed)
    found = READERS[name](config)
    # These formats leave routers dense, and may not list them. In transformers 5, "mlp.gate" is no linear layer.
    dense = routers if name in ("awq", "gptq") else routers[:1] if _by_transformers_5(model) else ()
    if dense:
        found = replace(found, ignored=(*found.ignored, *dense))
    return found


def _by_transformers_5(model: Fields) -> bool:
    major = str(model.values.get("transformers_version", "")).partition(".")[0]
    return major.isdecimal() and int(major) >= 5


def _check_modelopt(file: Path) -> None:
    """Raise ModelError if `file`, in which ModelOpt describes a checkpoint beside config.json, names a format."""
    quantization = Fields.of_file(file).section("quantization") if file.is_file() else None
    for key in ("quant_algo", "kv_cache_quant_algo"):
        if quantization is not None and key in quantization:
            allowed = "null, since formats of ModelOpt are not supported"
            raise quantization.wrong(key, quantization.values[key], allowed)


def _is_mixtral(model: Fields) -> bool:
    names = (model.values.get("model_type"), *model.texts("architectures"))
    return any(str(name).lower().startswith("mixtral") for name in names)


def _read_fp8(config: Fields) -> QuantizationConfig:
    """Read "fp8": blocks with scales (DeepSeek-V3, Qwen3), or one scale for each matrix."""
    _check_keys(
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
    ignored = (
        *DENSE_HEAD,
        *_layer_patterns(config, "modules_to_not_convert"),
        *_layer_patterns(config, "ignored_layers"),
    )
    if "weight_block_size" in config:
        block = _block_shape(config, "weight_block_size")
        method = ScaledMethod(FP8, block=block, scale_name="weight_scale_inv", redundant=redundant)
    else:
        method = ScaledMethod(FP8, per_tensor=True, redundant=redundant)
    return QuantizationConfig(method, ignored, kv_scales="layer" if "kv_cache_scheme" in config else None)


def _read_fbgemm_fp8(config: Fields) -> QuantizationConfig:
    """Read "fbgemm_fp8" (Meta): a scale for each row."""
    _check_keys(config, ("activation_scale_ub", "modules_to_not_convert"), {})
    method = ScaledMethod(FP8, redundant=("input_scale_ub",))
    return QuantizationConfig(method, (*DENSE_HEAD, *_layer_patterns(config, "modules_to_not_convert")))


def _read_awq(config: Fields) -> QuantizationConfig:
    _check_keys(
        config,
        ("bits", "w_bit", "group_size", "q_group_size", "zero_point", "modules_to_not_convert"),
        {
            **dict.fromkeys(("version", "format", "checkpoint_format"), ("gemm", "GEMM")),
            # GPTQModel writes these keys for AWQ, too.
            "method": ("awq",),
            "desc_act": (False,),
            "lm_head": (False,),
            "dynamic": ({},),
        },
    )
    for key in ("bits", "w_bit"):
        if config.integer(key, 4) != 4:
            raise config.wrong(key, config.values[key], "4")
    if not config.flag("zero_point", True):
        raise config.wrong("zero_point", False, "true")
    group = _group_size(config, "group_size" if "group_size" in config else "q_group_size")
    return QuantizationConfig(AWQMethod(group=group), (*DENSE_HEAD, *_layer_patterns(config, "modules_to_not_convert")))


def _read_gptq(config: Fields) -> QuantizationConfig:
    _check_keys(
        config,
        ("checkpoint_format", "format", "dynamic", "modules_in_block_to_quantize", *GPTQ_SETTINGS, *CALIBRATION_KEYS),
        {"method": ("gptq",), "lm_head": (False,), "data_type": ("int",)},
    )
    tensor_format = config.text("checkpoint_format", config.text("format", "gptq"))
    if tensor_format not in ("gptq", "gptq_v2"):
        raise config.wrong("checkpoint_format", tensor_format, "gptq, gptq_v2")
    offset = 1 if tensor_format == "gptq" else 0
    method = _gptq_method(config, GPTQMethod(bits=config.integer("bits"), offset=offset))
    dense, overrides = _dynamic_rules(config, method)
    return QuantizationConfig(method, (*DENSE_HEAD, *dense, *_outside_of_block_modules(config)), overrides)


def _gptq_method(fields: Fields, base: GPTQMethod) -> GPTQMethod:
    """Return `base` with the settings that are in `fields`."""
    bits = fields.integer("bits", base.bits)
    if bits not in (4, 8):
        raise fields.wrong("bits", bits, "4, 8")
    fields.flag("sym")  # only checked: zero points are stored in either case
    group = _group_size(fields, "group_size") if "group_size" in fields else base.group
    return replace(base, bits=bits, group=group, act_order=fields.flag("desc_act", base.act_order))


def _dynamic_rules(config: Fields, base: GPTQMethod) -> tuple[list[str], tuple[tuple[str, LinearMethod], ...]]:
    """Return the dense layers and the overrides of GPTQModel's key `dynamic`, as entries of a `QuantizationConfig`.

    Its keys are regular expressions, which match from the start of a layer's name. After "-:" they leave layers dense;
    after "+:" or nothing they replace some of the settings. GPTQModel tries all of the first kind before others.
    """
    rules = config.section("dynamic") or Fields(config.origin, {})
    dense: list[str] = []
    overrides: list[tuple[str, LinearMethod]] = []
    for rule in (*rules.values, *rules.nulls):
        settings = rules.section(rule)
        if settings is None:
            raise rules.wrong(rule, None, "a JSON object")
        prefix = rule[:2] if rule.startswith(("-:", "+:")) else ""
        _check_expression(config, "dynamic", rule, prefix)
        entry = f"re:{rule.removeprefix(prefix)}"
        if prefix == "-:":
            dense.append(entry)
            continue
        _check_keys(settings, (*GPTQ_SETTINGS, *CALIBRATION_KEYS), OVERRIDE_VALUES)
        overrides.append((entry, _gptq_method(settings, base)))
    return dense, tuple(overrides)


def _outside_of_block_modules(config: Fields) -> tuple[str, ...]:
    """Return an entry that matches the layers that `modules_in_block_to_quantize` leaves dense, if the key is there.

    As in transformers, a layer is quantised if its name ends with one of those in the list, or in its lists.
    """
    key = "modules_in_block_to_quantize"
    if key not in config:
        return ()
    value = config.values[key]
    parts = [part if isinstance(part, list) else [part] for part in value] if isinstance(value, list) else []
    names = [name for part in parts for name in part]
    if not names or not all(isinstance(name, str) and name for name in names):
        raise config.wrong(key, value, "a list of names of layers, or of lists of them, with at least one name")
    return (f"re:(?!.*(?:{'|'.join(map(re.escape, names))})$)",)


def _read_compressed_tensors(config: Fields) -> QuantizationConfig:
    """Read "compressed-tensors": groups of layers, each with a format."""
    _check_keys(
        config,
        ("config_groups", "format", "ignore", "kv_cache_scheme", "sparsity_config"),
        {"transform_config": ({},), "moe_sparsity_config": ()},
    )
    _check_sparsity(config)
    groups, kv_scales = config.section("config_groups") or Fields(config.origin, {}), _kv_scales(config)
    if not groups.values and kv_scales is None:
        raise config.wrong("config_groups", None, "a JSON object with at least one group")
    default: LinearMethod = DENSE
    overrides: list[tuple[str, LinearMethod]] = []
    for name in groups.values:
        group = groups.section(name)
        assert group is not None, "values of null are left out"
        method = _group_method(group, group.text("format", config.text("format", "")))
        patterns = _layer_patterns(group, "targets")
        if not patterns:
            raise group.wrong("targets", group.values.get("targets"), "a list with at least one layer")
        for pattern in patterns:
            if pattern == LINEAR:
                default = method
            else:
                overrides.append((pattern, method))
    overrides.sort(key=lambda override: override[0].startswith("re:"))  # names take precedence over expressions
    ignored = tuple(_layer_patterns(config, "ignore"))
    return QuantizationConfig(default, ignored, tuple(overrides), kv_scales=kv_scales)


def _check_sparsity(config: Fields) -> None:
    """Raise ModelError unless all weights are stored: "dense" weights may have zeros, which are stored like others."""
    sparsity = config.section("sparsity_config")
    if sparsity is None or not sparsity.values:
        return
    if sparsity.text("format", "") != "dense":
        raise sparsity.wrong("format", sparsity.values.get("format"), "dense")
    _check_keys(sparsity, SPARSITY_NOTES, {"format": ("dense",)})


def _kv_scales(config: Fields) -> KVScaleUnit | None:
    """Return which cached keys or values share a calibrated scale of the checkpoint; None: it has no such scales."""
    scheme = config.section("kv_cache_scheme")
    if scheme is None:
        return None
    allowed = {"num_bits": (8,), "type": ("float",), "dynamic": (False,), "symmetric": (True,), "actorder": (False,)}
    _check_keys(scheme, SCHEME_ARGUMENTS, allowed)
    if "type" not in scheme:
        raise scheme.wrong("type", None, "float")
    strategy = scheme.text("strategy", "tensor")
    if strategy not in KV_SCALE_UNITS:
        raise scheme.wrong("strategy", strategy, ", ".join(KV_SCALE_UNITS))
    return KV_SCALE_UNITS[strategy]


def _group_method(group: Fields, tensor_format: str) -> LinearMethod:
    """Return the weight format of one group of compressed-tensors, whose tensors are stored in `tensor_format`."""
    _check_keys(group, ("targets", "weights", "input_activations", "format"), {"output_activations": ()})
    weights = group.section("weights")
    if weights is None:
        raise group.wrong("weights", None, "a JSON object")
    if tensor_format not in FORMATS:
        raise group.wrong("format", tensor_format, ", ".join(FORMATS))
    _check_keys(weights, SCHEME_ARGUMENTS, {"dynamic": (False,), "actorder": (False, "weight", "static")})
    bits, kind = weights.integer("num_bits", 8), weights.text("type", "int")
    strategy = weights.text("strategy", "tensor")
    arguments = {"type": kind, "num_bits": bits, "strategy": strategy}
    for (key, value), allowed in zip(arguments.items(), FORMATS[tensor_format], strict=True):
        if value not in allowed:
            raise weights.wrong(key, value, f"{', '.join(map(str, allowed))}, with format {tensor_format}")
    _check_inputs(group)
    symmetric = weights.flag("symmetric", True)
    if tensor_format == "pack-quantized":
        columns = _group_size(weights, "group_size") if strategy == "group" else None
        return PackQuantizedMethod(bits=bits, group=columns, zero_points=not symmetric)
    if not symmetric:
        raise weights.wrong("symmetric", False, f"true, with format {tensor_format}")
    return ScaledMethod(
        FP8 if kind == "float" else torch.int8,
        block=_block_shape(weights, "block_structure") if strategy == "block" else None,
        per_tensor=strategy == "tensor",
        redundant=("input_scale", "input_zero_point", "weight_zero_point"),
    )


def _check_inputs(group: Fields) -> None:
    """Raise ModelError for unknown arguments of input quantisation."""
    inputs = group.section("input_activations")
    if inputs is None:
        return
    _check_keys(inputs, SCHEME_ARGUMENTS, {"actorder": (False,), "dynamic": (True, False), "num_bits": (8,)})
    strategy = inputs.text("strategy", "tensor")
    if strategy not in ("token", "tensor", "group"):
        raise inputs.wrong("strategy", strategy, "token, tensor, group")


def _check_keys(fields: Fields, read: Collection[str], allowed: Mapping[str, tuple[object, ...]]) -> None:
    """Raise ModelError for an unknown key or a value that is not allowed.

    read     keys that the caller reads itself
    allowed  values of further keys; no values: null only
    """
    for key, value in fields.values.items():
        if key in allowed:
            same = (value == other and isinstance(value, bool) == isinstance(other, bool) for other in allowed[key])
            if not any(same):
                raise fields.wrong(key, value, " or ".join(map(json.dumps, allowed[key])) or "null")
        elif key not in read and key not in IGNORED_KEYS:
            raise ModelError(f"{fields.origin}: {key} is not known; allowed: {', '.join(sorted({*read, *allowed}))}")


def _layer_patterns(fields: Fields, key: str) -> list[str]:
    """Return the names and "re:" expressions that match layers in a `QuantizationConfig`; empty without the key."""
    entries = fields.texts(key)
    for entry in entries:
        if entry.startswith("re:"):
            _check_expression(fields, key, entry, "re:")
    return entries


def _check_expression(fields: Fields, key: str, entry: str, prefix: str) -> None:
    """Raise ModelError unless `entry` consists of `prefix` and a regular expression."""
    try:
        re.compile(entry.removeprefix(prefix))
    except (re.error, OverflowError) as error:
        allowed = f"{prefix} and a regular expression" if prefix else "a regular expression"
        raise fields.wrong(key, entry, f"{allowed} ({error})") from None


def _group_size(fields: Fields, key: str) -> int | None:
    """Return the number of columns that share a scale; None: all."""
    size = fields.integer(key, 128, minimum=ALL_COLUMNS)
    if size == 0:
        raise fields.wrong(key, size, "-1 or a positive integer")
    return None if size == ALL_COLUMNS else size


def _block_shape(fields: Fields, key: str) -> tuple[int, int]:
    """Return rows and columns of a block, as a list of two numbers or as "128x128"."""
    value = fields.values.get(key)
    sizes: object = value.split("x") if isinstance(value, str) else value
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(str(size).isdecimal() and int(size) for size in sizes):
        raise fields.wrong(key, value, "a list of two positive integers")
    return int(sizes[0]), int(sizes[1])


# Settings that GPTQModel's `dynamic` overrides.
GPTQ_SETTINGS = ("bits", "group_size", "desc_act", "sym")
# Keys of GPTQModel that say how layers were calibrated.
CALIBRATION_KEYS = ("mse", "damp_auto_increment", "fallback", "hessian", "gptaq", "foem")
# Values of keys of `dynamic` that do not differ from the rest of the checkpoint.
OVERRIDE_VALUES: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {"quant_method": ("gptq",), "method": ("gptq",), "data_type": ("int",), "pack_dtype": ("int32",)}
)
# Keys of compressed-tensors' QuantizationArgs, for weights and for inputs.
SCHEME_ARGUMENTS = ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic", "actorder")
# Keys of compressed-tensors' `sparsity_config` that describe dense weights.
SPARSITY_NOTES = ("global_sparsity", "sparsity_structure", "registry_requires_subclass", "targets", "ignore")
# Strategies of `kv_cache_scheme`.
KV_SCALE_UNITS: Mapping[str, KVScaleUnit] = MappingProxyType({"tensor": "layer", "attn_head": "head"})
# For each format of compressed-tensors: its types, numbers of bits and strategies.
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

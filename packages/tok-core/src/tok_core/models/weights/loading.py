"""Load a checkpoint into a model's parameters, reading only the part of each tensor that this worker holds."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tok_core.errors import ModelError
from tok_core.model_config import ModelConfig
from tok_core.models.decoder import CausalLM
from tok_core.models.eagle3 import DraftVocabulary
from tok_core.models.layers import KVScales, Linear
from tok_core.models.weights.float16 import recast_overflowing_qkv
from tok_core.models.weights.targets import EMBEDDING, HEAD, modules, stacked_targets, targets
from tok_core.quantization import (
    MIXTRAL_MATRICES,
    BadTensor,
    DenseMethod,
    GPTQMethod,
    LinearMethod,
    StackedTarget,
    StoredTensor,
    WeightTarget,
    read_quantization,
)
from tok_core.runtime import HEARTBEAT

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_THREADS = 8  # threads that copy tensors of a checkpoint
MAX_NAMED_TENSORS = 8  # tensors named in an error; further ones are only counted
COMPARED_ROWS = 16_384  # rows of the embedding and the LM head that are read at once to compare them
PREFIX = "model."
MIDLAYER = "model.midlayer."  # start of the names of an EAGLE-3 head's only layer in most checkpoints
_OUTER = ("model.embed_tokens", "model.norm", "lm_head")  # modules outside of layers
_KV_SCALE = re.compile(r"\.([kv])_proj\.(?:output_scale|\1_scale)$")  # names of KV scales in older formats
MIXTRAL = ".block_sparse_moe."  # component of tensor names in Mixtral's checkpoints, in place of ".mlp."
_MIXTRAL_MATRIX = re.compile(r"\.(w[123])\.")
_EXPERT_MATRIX = re.compile(r"(\.experts\.\d+\.)(gate_proj|up_proj|down_proj)\.")
# Modules of feed-forwards, which may differ from layer to layer.
_FEED_FORWARD = re.compile(
    r"mlp\.(gate|(experts\.(\d+\.)?|shared_expert\.)?(gate|up|down)_proj|shared_expert_gate|experts)"
)
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"\.mlp\.experts\.(\d{1,4})\.")


def load_checkpoint(model: CausalLM, path: Path) -> None:
    """Copy the checkpoint in directory `path` into `model`, cast to its dtype; read only this worker's part.

    Names may lack the prefix `model.`, as AutoModel saves them. All ranks of a stage call this together. Weights beyond
    float16's range are read a second time (see `recast_overflowing_qkv`).
    Raises ModelError for missing, unexpected or repeated tensors, for tensors of a wrong shape or dtype, for corrupt
    scales, for unreadable files, and for an LM head that differs from the embedding in a model built as tied: see
    `resolve_tied_embeddings`.
    """
    names, model_targets = _match_tensors(model, path)
    for file, file_names in names.items():
        _load_file(file, file_names, model_targets, model.dtype)
    if refill := recast_overflowing_qkv(model):
        for file, file_names in names.items():
            _load_file(file, {name: own for name, own in file_names.items() if own in refill}, refill, model.dtype)


def check_checkpoint(model: CausalLM, path: Path) -> None:
    """Raise ModelError if `load_checkpoint` would, and change nothing.

    Reads the values only of tensors that `load_checkpoint` may refuse for their values: matrices to quantise, scales,
    and tensors cast to a dtype of smaller range. Refuses GPTQ zero points of another version than the model's, too.
    """
    _check_zero_points(model, path)
    names, model_targets = _match_tensors(model, path)
    for file, file_names in names.items():
        _check_values(file, file_names, model_targets, model.dtype)


def _check_zero_points(model: CausalLM, path: Path) -> None:
    """Raise ModelError if the checkpoint's `checkpoint_format` is gptq and the model's gptq_v2, or vice versa.

    Both have the same tensors, but zero points of gptq are stored less 1.
    """
    layers = [(prefix, linear) for prefix, linear in _linears(model) if isinstance(linear.method, GPTQMethod)]
    if not layers or not (path / "config.json").is_file():
        return
    quantization = read_quantization(path)
    for prefix, linear in layers:
        stored, own = quantization.method_of([f"{prefix}{name}" for name in linear.parts]), linear.method
        if isinstance(stored, GPTQMethod) and isinstance(own, GPTQMethod) and stored.offset != own.offset:
            raise ModelError(
                f"{path / 'config.json'}: quantization_config: checkpoint_format is {stored.tensor_format!r}; allowed: "
                f"{own.tensor_format}, the running model's"
            )


def _match_tensors(model: CausalLM, path: Path) -> tuple[dict[Path, dict[str, str]], Mapping[str, WeightTarget]]:
    """Return the tensors to load from each file of directory `path`, as `_tensors_to_load` does, and their targets.

    Reads headers only. Raises ModelError for a wrong shape or dtype, for missing tensors, and for a model built as tied
    whose checkpoint is not.
    """
    if resolve_tied_embeddings(model.config, path) != model.config:
        raise ModelError(
            f"{path}: {HEAD} differs from {EMBEDDING}, but the running model has one matrix for both; restart with it"
        )
    names = _canonical_names(model, checkpoint_files(path))
    single, stacked = targets(model), stacked_targets(model)
    model_targets = _with_stacked(single, stacked, names)
    formats = {f"{prefix}{name}": linear.method for prefix, linear in _linears(model) for name in linear.parts}
    names = _tensors_to_load(names, model_targets, SkippedTensors(model, {**single, **stacked}), formats)
    for file, file_names in names.items():
        _check_shapes_and_dtypes(file, file_names, model_targets, formats)
    missing = set(model_targets).difference(*(file_names.values() for file_names in names.values()))
    if missing:
        raise ModelError(f"{path}: missing tensors: {format_tensors(missing, model_targets)}")
    return names, model_targets


def _with_stacked(
    single: Mapping[str, WeightTarget], stacked: Mapping[str, StackedTarget], names: Mapping[Path, Mapping[str, str]]
) -> Mapping[str, WeightTarget]:
    """Return `single`, with a stacked target in place of its pieces where the files hold the stacked tensor."""
    stored = {own for file_names in names.values() for own in file_names.values()}
    used = {own: target for own, target in stacked.items() if own in stored}
    pieces = {piece for target in used.values() for piece in target.pieces}
    return {own: target for own, target in single.items() if own not in pieces} | used


def resolve_tied_embeddings(config: ModelConfig, path: Path) -> ModelConfig:
    """Return `config`, untied if the checkpoint in directory `path` has an LM head that differs from its embedding.

    Such a checkpoint contradicts its config; transformers 5 unties it as well.
    """
    if not config.tied:
        return config
    stored: dict[str, tuple[Path, str]] = {}
    for file in checkpoint_files(path):
        with _opened(file) as tensors:
            stored |= {_prefixed(name): (file, name) for name in tensors.keys()}  # noqa: SIM118 – no mapping
    if EMBEDDING not in stored or HEAD not in stored:
        return config
    with _opened(stored[EMBEDDING][0]) as first, _opened(stored[HEAD][0]) as second:
        embedding, head = first.get_slice(stored[EMBEDDING][1]), second.get_slice(stored[HEAD][1])
        if embedding.get_shape() != head.get_shape():
            return replace(config, tied=False)
        for start in range(0, embedding.get_shape()[0], COMPARED_ROWS):
            rows = slice(start, start + COMPARED_ROWS)
            if not torch.equal(embedding[rows,].float(), head[rows,].float()):
                return replace(config, tied=False)
    return config


def tensor_names(path: Path) -> set[str]:
    """Return the model's names of the tensors in directory `path`; read headers only."""
    names = set[str]()
    for file in checkpoint_files(path):
        with _opened(file) as tensors:
            names.update(map(canonical_name, tensors.keys()))
    return names


def checkpoint_files(path: Path) -> list[Path]:
    """Return the safetensors files of a directory: the single file, or those of its index. Raise ModelError if none."""
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    index = path / INDEX
    if not index.is_file():
        raise ModelError(f"{path}: has neither {SINGLE} nor {INDEX}; supported: safetensors only")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{index}: is not an index of safetensors files: {error!r}") from error
    if not names:
        raise ModelError(f"{index}: names no file in weight_map")
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not (path / name).is_file():
            raise ModelError(f"{index}: names the file {name!r}, which is not in {path}")
    return [path / name for name in names]


@contextmanager
def _opened(file: Path) -> Iterator[TensorFile]:
    """Open a safetensors file and yield its tensors. Raise ModelError if the file cannot be read."""
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file}: cannot be read as safetensors: {error}") from error


def _prefixed(name: str) -> str:
    """Return a tensor's name with the prefix that AutoModel leaves out."""
    return name if name.startswith((PREFIX, "lm_head.")) else PREFIX + name


def canonical_name(name: str) -> str:
    """Return the model's name of a tensor: prefixed, with the usual names of scales, layers, and Mixtral's experts."""
    name = _KV_SCALE.sub(r".\1_scale", _prefixed(name)).replace(MIDLAYER, "model.layers.0.")
    if MIXTRAL not in name:
        return name
    return _MIXTRAL_MATRIX.sub(lambda found: f".{MIXTRAL_MATRICES[found[1]]}.", name.replace(MIXTRAL, ".mlp."))


def mixtral_name(name: str) -> str:
    """Return the name of a tensor in Mixtral's checkpoints by the model's name, or by itself."""
    name = name.replace(".mlp.", MIXTRAL)
    names = {own: stored for stored, own in MIXTRAL_MATRICES.items()}
    return _EXPERT_MATRIX.sub(lambda found: f"{found[1]}{names[found[2]]}.", name)


def _canonical_names(model: CausalLM, files: list[Path]) -> dict[Path, dict[str, str]]:
    """Return, for each file, the names of its tensors: `{name in the file: name in the model}`.

    If a tied model's checkpoint has no embedding, its LM head gets the embedding's name.
    """
    names: dict[Path, dict[str, str]] = {}
    for file in files:
        with _opened(file) as tensors:
            names[file] = {
                name: canonical_name(name)
                for name in tensors.keys()  # noqa: SIM118 – no mapping
            }
    stored = [own for file_names in names.values() for own in file_names.values()]
    if model.config.tied and EMBEDDING not in stored:
        names = {
            file: {name: EMBEDDING if own == HEAD else own for name, own in file_names.items()}
            for file, file_names in names.items()
        }
    return names


def _linears(model: CausalLM) -> Iterator[tuple[str, Linear]]:
    return ((prefix, module) for prefix, module in modules(model) if isinstance(module, Linear))


def _tensors_to_load(
    names: dict[Path, dict[str, str]],
    model_targets: Mapping[str, WeightTarget],
    skipped: SkippedTensors,
    formats: Mapping[str, LinearMethod],
) -> dict[Path, dict[str, str]]:
    """Return, for each file, the names of the tensors to load from it.

    Raises ModelError for a tensor that has no place in the model, and for one that is stored twice.
    """
    seen = set()
    for file, file_names in names.items():
        with _opened(file) as tensors:
            for name, own in list(file_names.items()):
                if own in seen:
                    raise ModelError(f"{file}: tensor {name} is stored twice (the prefix {PREFIX} makes no difference)")
                seen.add(own)
                if own in model_targets:
                    continue
                layer, method = _module(own), formats.get(_module(own))
                if isinstance(method, GPTQMethod) and own in skipped and own.endswith(".g_idx"):
                    _check_group_order(file, name, tensors.get_tensor(name), method)
                if own not in skipped and not (own.endswith(".bias") and _is_zero_bias(tensors, name, method)):
                    shape = tensors.get_slice(name).get_shape()
                    format_known = f", whose {layer} is {method}" if method is not None else ""
                    raise ModelError(f"{file}: tensor {name} {shape} has no place in the model{format_known}")
                del file_names[name]
    return names


def _is_zero_bias(tensors: TensorFile, name: str, method: LinearMethod | None) -> bool:
    """Return whether a bias holds zeros, which AutoGPTQ writes for layers without a bias."""
    return isinstance(method, GPTQMethod) and not tensors.get_tensor(name).any()


def _check_group_order(file: Path, name: str, group_K: Tensor, method: GPTQMethod) -> None:
    """Raise ModelError unless groups are consecutive columns, as in a layer without `desc_act`."""
    if not torch.equal(group_K, torch.arange(len(group_K), dtype=group_K.dtype) // (method.group or len(group_K))):
        raise ModelError(
            f"{file}: tensor {name} has other groups of columns than desc_act false of quantization_config implies; "
            "allowed: desc_act true"
        )


def _load_file(
    file: Path, names: Mapping[str, str], model_targets: Mapping[str, WeightTarget], dtype: torch.dtype
) -> None:
    """Copy one file's tensors into `model_targets`; `names` maps their names in the file to the model's names.

    Several threads copy tensors at once, since one thread alone reads memory or a disk at a fraction of its speed.
    """

    def copy(name: str) -> None:
        stored, target = tensors.get_slice(name), model_targets[names[name]]
        part = tensors.get_tensor(name) if target.is_whole else target.part_of(stored)
        try:
            fits = target.fill(part)
        except BadTensor as error:
            raise ModelError(f"{file}: tensor {name} {error}") from None
        # A target of another dtype is a float16 projection: `recast_overflowing_qkv` recasts it if it overflows.
        if not fits and target.view.dtype == dtype:
            raise _overflow_error(file, name, dtype)

    with _opened(file) as tensors, ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0)))) as pool:
        for _ in pool.map(copy, names):  # raises the first error
            HEARTBEAT.turned()


def _check_shapes_and_dtypes(
    file: Path,
    names: Mapping[str, str],
    model_targets: Mapping[str, WeightTarget],
    formats: Mapping[str, LinearMethod],
) -> None:
    """Check shapes and dtypes of one file's tensors; errors name the layer's weight format, from `formats`."""
    with _opened(file) as tensors:
        for name, own_name in names.items():
            HEARTBEAT.turned()
            stored, target, layer = tensors.get_slice(name), model_targets[own_name], _module(own_name)
            since = f", since {layer} is {formats[layer]}" if layer in formats else ""
            if not target.takes(stored.get_shape()):
                shape, expected = stored.get_shape(), target.shape
                since = "" if isinstance(formats.get(layer), DenseMethod) else since
                raise ModelError(f"{file}: tensor {name} has shape {shape}; expected {expected}{since}")
            if stored.get_dtype() not in target.stored_dtypes:
                allowed = f"{', '.join(target.stored_dtypes)}{since}"
                raise ModelError(f"{file}: tensor {name} is stored as {stored.get_dtype()}; supported: {allowed}")


def _check_values(
    file: Path, names: Mapping[str, str], model_targets: Mapping[str, WeightTarget], dtype: torch.dtype
) -> None:
    """Check the numbers of one file's tensors."""
    with _opened(file) as tensors:
        for name, own_name in names.items():
            HEARTBEAT.turned()
            stored, target = tensors.get_slice(name), model_targets[own_name]
            may_overflow = target.view.dtype == dtype and target.narrows(stored.get_dtype())
            if not (may_overflow or target.is_restricted):
                continue
            try:
                fits = target.check(target.part_of(stored))
            except BadTensor as error:
                raise ModelError(f"{file}: tensor {name} {error}") from None
            if may_overflow and not fits:
                raise _overflow_error(file, name, dtype)


def _overflow_error(file: Path, name: str, dtype: torch.dtype) -> ModelError:
    largest, short = torch.finfo(dtype).max, str(dtype).removeprefix("torch.")
    return ModelError(
        f"{file}: tensor {name} holds numbers beyond {largest:.0f}, which {short} cannot hold; --dtype float32 can"
    )


class TensorFile(Protocol):
    """An open safetensors file."""

    def keys(self) -> list[str]: ...

    def get_slice(self, name: str) -> StoredTensor: ...

    def get_tensor(self, name: str) -> Tensor: ...


class SkippedTensors:
    """Set of the names of checkpoint tensors that this worker skips instead of refusing.

    It contains tensors of other pipeline stages, whose names those stages check, of experts on other ranks, and
    redundant tensors: rotary frequencies, the LM head of a tied model, and `LinearMethod.redundant`.
    """

    def __init__(self, model: CausalLM, model_targets: Iterable[str]) -> None:
        """`model_targets`: the names of all targets, stacked ones included."""
        self._layers = range(model.config.num_layers)
        self._has_experts = model.config.moe is not None
        self._tied = model.config.tied
        self._experts = 0 if model.config.moe is None else model.config.moe.experts
        self._targets = set(model_targets)
        self._own = {_module(name) for name in self._targets}
        self._redundant = {
            f"{prefix}{name}.{end}"
            for prefix, module in _linears(model)
            for name in module.parts
            for end in module.method.redundant
        } | {
            f"{prefix}{name}"
            for prefix, module in modules(model)
            if isinstance(module, KVScales | DraftVocabulary)
            for name in module.redundant
        }
        names = self._targets | self._redundant
        self._of_experts = {_of_first_expert(name) for name in names if _EXPERT.search(name)}
        found_layers = [found for module in self._own if (found := _LAYER.fullmatch(module))]
        self._of_layer = {found[2] for found in found_layers}
        self._own_layers = {found[1] for found in found_layers}

    def __contains__(self, name: str) -> bool:
        if name.endswith("rotary_emb.inv_freq") or name in self._redundant or (self._tied and name == HEAD):
            return True
        if self._is_of_other_rank(name):
            return True
        module = _module(name)
        if module in self._own:
            return False
        found = _LAYER.fullmatch(module)
        if found is None:
            return module in _OUTER and not (self._tied and module == "lm_head")
        may_differ = self._has_experts and found[1] not in self._own_layers
        known = found[2] in self._of_layer or (may_differ and _FEED_FORWARD.fullmatch(found[2]) is not None)
        return known and int(found[1]) in self._layers

    def _is_of_other_rank(self, name: str) -> bool:
        """Return whether the tensor belongs to an expert of another rank, which has a tensor of this name."""
        found = _EXPERT.search(name)
        if found is None or int(found[1]) >= self._experts or _module(name) in self._own:
            return False
        return _of_first_expert(name) in self._of_experts


def _of_first_expert(name: str) -> str:
    """Return the name that a tensor of an expert would have if it were of expert 0."""
    return _EXPERT.sub(".mlp.experts.0.", name)


def _module(name: str) -> str:
    """Return the name of a tensor's module: "lm_head" for "lm_head.weight"."""
    return name.rpartition(".")[0]


def format_tensors(names: set[str], model_targets: Mapping[str, WeightTarget]) -> str:
    """Return some of the tensors' names and shapes, for an error."""
    shown = [f"{name} {model_targets[name].shape}" for name in sorted(names)[:MAX_NAMED_TENSORS]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")

"""Fills a model's parameters from a checkpoint: of each tensor just the part that is here, right into its place."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from tok_core.errors import ModelError
from tok_core.model.decoder import CausalLM
from tok_core.model.float16 import keep_coarse
from tok_core.model.targets import StoredTensor, Target, targets

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
STORED_DTYPES = ("F32", "F16", "BF16")
NAMED_AT_MOST = 8  # tensors an error lists before it only counts
_OUTER = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def load(model: CausalLM, path: Path) -> None:
    """Copies the checkpoint in directory `path` into `model`, cast to its dtype; reads nothing that is not its own.

    All ranks of a stage are to call it together. What float16 has not the range for is read a second time.
    Raises ModelError for missing, unexpected, misshapen or non-float tensors and for unreadable files.
    """
    wanted, files = targets(model), checkpoint_files(path)
    elsewhere = _Elsewhere(model, wanted)
    missing = set(wanted)
    for file in files:
        missing -= _load_file(file, wanted, elsewhere, model.dtype)
    if missing:
        raise ModelError(f"{path}: missing tensors: {_listed(missing, wanted)}")
    if again := keep_coarse(model):
        for file in files:
            _load_file(file, again, elsewhere, model.dtype)


def checkpoint_files(path: Path) -> list[Path]:
    """The safetensors files of a directory: the single one, or those its index names. None: ModelError."""
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    index = path / INDEX
    if not index.is_file():
        raise ModelError(f"{path}: has neither {SINGLE} nor {INDEX}; supported: safetensors only")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: is no index of safetensors files: {error!r}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not (path / name).is_file():
            raise ModelError(f"{index}: names the file {name!r}, which is not in {path}")
    return [path / name for name in names]


def _load_file(file: Path, wanted: Mapping[str, Target], elsewhere: _Elsewhere, dtype: torch.dtype) -> set[str]:
    """Copies the tensors of one file; returns their names."""
    loaded = set()
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            for name in tensors.keys():  # noqa: SIM118 – no mapping
                if name not in wanted and name in elsewhere:
                    continue
                stored = tensors.get_slice(name)
                target = _checked(file, name, stored, wanted)
                own = tensors.get_tensor(name) if target.is_whole else target.part_of(stored)
                # What is held in a finer dtype than asked for is seen to later.
                if not target.fill(own) and target.view.dtype == dtype:
                    raise _no_room(file, name, dtype)
                loaded.add(name)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file}: cannot be read as safetensors: {error}") from error
    return loaded


def _no_room(file: Path, name: str, dtype: torch.dtype) -> ModelError:
    most, short = torch.finfo(dtype).max, str(dtype).removeprefix("torch.")
    return ModelError(
        f"{file}: tensor {name} holds numbers beyond {most:.0f}, which {short} cannot hold; --dtype float32 can"
    )


class _Elsewhere:
    """Names of tensors that a checkpoint may hold although the model at hand does not: those of other pipeline
    stages, and what some checkpoints hold although it follows from the rest."""

    def __init__(self, model: CausalLM, wanted: Mapping[str, Target]) -> None:
        self._layers = range(model.config.num_layers)
        self._tied = model.config.tied
        self._of_layer = {found[2] for name in wanted if (found := _LAYER.fullmatch(name))}

    def __contains__(self, name: str) -> bool:
        if name.endswith("rotary_emb.inv_freq") or (self._tied and name == "lm_head.weight"):
            return True
        found = _LAYER.fullmatch(name)
        if found is None:
            return name in _OUTER
        return int(found[1]) in self._layers and found[2] in self._of_layer


def _checked(file: Path, name: str, stored: StoredTensor, wanted: Mapping[str, Target]) -> Target:
    if name not in wanted:
        raise ModelError(f"{file}: tensor {name} {stored.get_shape()} has no place in the model")
    expected = wanted[name].shape
    if stored.get_shape() != expected:
        raise ModelError(f"{file}: tensor {name} has shape {stored.get_shape()}; expected {expected}")
    if stored.get_dtype() not in STORED_DTYPES:
        allowed = ", ".join(STORED_DTYPES)
        raise ModelError(f"{file}: tensor {name} is stored as {stored.get_dtype()}; supported: {allowed}")
    return wanted[name]


def _listed(names: set[str], wanted: Mapping[str, Target]) -> str:
    shown = [f"{name} {wanted[name].shape}" for name in sorted(names)[:NAMED_AT_MOST]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")

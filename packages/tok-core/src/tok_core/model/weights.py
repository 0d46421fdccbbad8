"""Fills a model's parameters: each checkpoint tensor right into its slice of a fused one, or with noise."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from tok_core.errors import InvalidField, ModelError
from tok_core.model.decoder import CausalLM
from tok_core.model.layers import Linear

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
STORED_DTYPES = ("F32", "F16", "BF16")
NOISE = 1e-3  # dummy weights are uniform in ±NOISE
NAMED_AT_MOST = 8  # tensors an error lists before it only counts


class StoredTensor(Protocol):
    """A tensor of a safetensors file, described but not yet read."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...


def load(model: CausalLM, path: Path) -> None:
    """Copies the checkpoint in directory `path` into `model`, cast to its dtype.

    Raises ModelError for missing, unexpected, misshapen or non-float tensors and for unreadable files.
    """
    slices = checkpoint_slices(model)
    missing = set(slices)
    for file in checkpoint_files(path):
        missing -= _load_file(file, slices, tied=model.config.tied)
    if missing:
        raise ModelError(f"{path}: missing tensors: {_listed(missing, slices)}")


def dummy(
    model: CausalLM, seed: int = 0, *, eos_probability: float | None = None, eos_temperature: float = 0.6
) -> None:
    """Fills every parameter, norms included, uniformly from ±1e-3, so that logits are nearly flat.

    With `eos_probability` each token is an end id with that probability, drawn at `eos_temperature`, whatever came
    before: lengths are geometric. Raises InvalidField for a model without end ids.
    Equal seeds give equal weights on one kind of device.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for parameter in model.parameters():
        device = parameter.device
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(seed)
        parameter.uniform_(-NOISE, NOISE, generator=generators[device])
    if eos_probability is not None:
        _favour_end_ids(model, eos_probability, eos_temperature)


def _favour_end_ids(model: CausalLM, probability: float, temperature: float) -> None:
    """Makes coordinate 0 of the last hidden state 1 after every token: its column of the LM head then is the logits.

    Every token's embedding has the same `lift` there, and the layers add next to nothing to it. The final norm
    divides by the root mean square, of which `lift` is twice, and multiplies by 1/2.
    """
    config, ends = model.config, list(model.config.eos_token_ids)
    if not ends:
        raise InvalidField("eos_probability", probability, "nothing (the model has no end id)")
    size = config.hidden_size
    others = NOISE**2 / 3 * (size - 1) / size + config.rms_norm_eps
    embedding, head = model.model.embed_tokens.weight, model.lm_head
    # As it will be stored: where the head is the embedding, it is also the logit of every other id.
    lift = torch.tensor(2 * math.sqrt(others / (1 - 4 / size)), dtype=embedding.dtype).item()
    rest = config.vocab_size - len(ends)
    gain = temperature * math.log(rest * probability / (len(ends) * (1 - probability)))
    embedding[:, 0] = lift
    model.model.norm.weight[0] = 0.5
    if head is None:
        embedding[ends, 0] = lift + gain
    else:
        head.weight[:, 0] = 0.0
        head.weight[ends, 0] = gain


def checkpoint_slices(model: nn.Module) -> dict[str, Tensor]:
    """For each tensor name of a checkpoint the view that it fills; together they cover all parameters."""
    slices: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, Linear):
                parent = path.rpartition(".")[0]
                views = parameter.split(list(module.parts.values()))
                for part, view in zip(module.parts, views, strict=True):
                    slices[f"{parent}.{part}.{name}".removeprefix(".")] = view
            else:
                slices[f"{path}.{name}"] = parameter
    return slices


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


def _load_file(file: Path, slices: dict[str, Tensor], *, tied: bool) -> set[str]:
    """Copies the tensors of one file; returns their names."""
    loaded = set()
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            for name in _wanted(tensors.keys(), tied):
                target = _target(file, name, tensors.get_slice(name), slices)
                target.copy_(tensors.get_tensor(name))
                loaded.add(name)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file}: cannot be read as safetensors: {error}") from error
    return loaded


def _wanted(names: list[str], tied: bool) -> Iterator[str]:
    """Leaves out what some checkpoints hold although it follows from the rest."""
    for name in names:
        if name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight"):
            continue
        yield name


def _target(file: Path, name: str, stored: StoredTensor, slices: dict[str, Tensor]) -> Tensor:
    if name not in slices:
        raise ModelError(f"{file}: tensor {name} {stored.get_shape()} has no place in the model")
    expected = list(slices[name].shape)
    if stored.get_shape() != expected:
        raise ModelError(f"{file}: tensor {name} has shape {stored.get_shape()}; expected {expected}")
    if stored.get_dtype() not in STORED_DTYPES:
        allowed = ", ".join(STORED_DTYPES)
        raise ModelError(f"{file}: tensor {name} is stored as {stored.get_dtype()}; supported: {allowed}")
    return slices[name]


def _listed(names: set[str], slices: dict[str, Tensor]) -> str:
    shown = [f"{name} {list(slices[name].shape)}" for name in sorted(names)[:NAMED_AT_MOST]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")

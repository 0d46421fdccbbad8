"""Write tiny mixtures of experts in other layouts: a tensor for each matrix, other settings, quantised experts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from support.quantized_models import SCHEMES, Make

MOE_KINDS = ("mixtral", "qwen2-moe", "qwen3-moe")
WEIGHTS = "model.safetensors"
ROUTERS = ["lm_head", "re:.*block_sparse_moe\\.gate$", "re:.*mlp\\.gate$", "re:.*shared_expert_gate$"]


def as_they_are(tensors: dict[str, Tensor]) -> None:
    """Leave the tensors of a model as they are."""


def changed(path: Path, out: Path, change: Callable[[dict[str, Tensor]], object] = as_they_are, **keys: object) -> Path:
    """Write a copy of a model with other tensors, and with other `keys` of config.json; a key of None is removed."""
    out.mkdir()
    tensors, config = load_file(path / WEIGHTS), json.loads((path / "config.json").read_text())
    change(tensors)
    save_file(tensors, out / WEIGHTS, metadata={"format": "pt"})
    config = {key: value for key, value in (config | keys).items() if value is not None}
    (out / "config.json").write_text(json.dumps(config))
    return out


def single(path: Path, out: Path) -> Path:
    """Write a copy of a model with a tensor for each matrix of each expert, as transformers saves it."""
    stored = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    model = AutoModelForCausalLM.from_config(stored.config)  # one that was loaded is saved as it was stored
    model.load_state_dict(stored.state_dict())
    model.save_pretrained(out)
    return out


def quantised(
    path: Path, scheme: str, out: Path, dense: str = "", others: Mapping[str, Make] | None = None, **keys: object
) -> tuple[Path, Path]:
    """Write the model at `path`, a tensor for each matrix, in one of `SCHEMES`, and its dequantised equal.

    Matrices whose names contain `dense` stay dense, and those whose names contain a key of `others` are made by its
    value. `keys` are added to `quantization_config`.
    """
    made, rng, dequantised = SCHEMES[scheme], np.random.default_rng(0), dict[str, Tensor]()

    def quantise(tensors: dict[str, Tensor]) -> None:
        dequantised.update(tensors)
        for name in [name for name in tensors if re.search(r"(_proj|\.w[123])\.weight$", name)]:
            if dense and dense in name:
                continue
            rows, columns = tensors.pop(name).shape
            make = next((other for part, other in (others or {}).items() if part in name), made.make)
            parts, dequantised[name] = make(rows, columns, rng)
            tensors.update({f"{name.removesuffix('weight')}{end}": part for end, part in parts.items()})

    method = made.config["quant_method"]
    key = "ignore" if method == "compressed-tensors" else "modules_to_not_convert"
    config = made.config if method in ("awq", "gptq") else {**made.config, key: ROUTERS}
    written = changed(path, out, quantise, quantization_config={**config, **keys})
    return written, changed(path, out.with_name(f"{out.name}-dense"), lambda tensors: tensors.update(dequantised))

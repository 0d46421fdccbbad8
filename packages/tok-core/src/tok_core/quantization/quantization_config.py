"""QuantizationConfig: the weight format of each linear layer of a model, chosen by the layer's name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from tok_core.errors import ModelError
from tok_core.quantization.dense import DENSE
from tok_core.quantization.linear_method import LinearMethod

MAX_NAMED_MATRICES = 3  # in an error; further ones are only counted
MIXTRAL = "block_sparse_moe"  # in the names of its checkpoints, in place of "mlp"
MIXTRAL_MATRICES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_MIXTRAL_MATRIX = re.compile(r"(?<=\.)w[123]\b")
KVScaleUnit = Literal["layer", "head"]
"""Keys or values that share a scale: all of a layer, or those of each key/value head."""


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """Methods of a model's linear layers, by their names in its checkpoint ("model.layers.3.mlp.down_proj").

    method     of all linear layers that the other fields do not name
    ignored    layers that stay dense. An entry is a name, consecutive components of names ("lm_head", "layers.3.mlp",
               "model.layers.0."), or "re:" and a regular expression that matches from the start of a name
    overrides  entries like those of `ignored`, each with the method of the layers that match; the first match counts
    online     the checkpoint is dense, and loading quantises it
    kv_scales  keys or values that share a scale of the checkpoint, for a KV cache in float8; None: it has no scales
    """

    method: LinearMethod = DENSE
    ignored: tuple[str, ...] = ()
    overrides: tuple[tuple[str, LinearMethod], ...] = ()
    online: bool = False
    kv_scales: KVScaleUnit | None = None

    def __str__(self) -> str:
        dense = [f"dense: {', '.join(self.ignored)}"] if self.ignored else []
        method = f"{self.method}, rounded while loading" if self.online else str(self.method)
        return "; ".join([method, *(f"{method}: {entry}" for entry, method in self.overrides), *dense])

    def method_of(self, names: Sequence[str]) -> LinearMethod:
        """Return the method of a layer that stacks the matrices `names`. Raise ModelError if their methods differ."""
        methods = [self._method_of(name) for name in names]
        others = [name for name, method in zip(names, methods, strict=True) if method != methods[0]]
        if others:
            same = [name for name in names if name not in others]
            raise ModelError(
                f"quantization_config gives {_named(others)} another weight format than {_named(same)}; allowed: one "
                "format, since they are computed as one layer"
            )
        return methods[0]

    def _method_of(self, name: str) -> LinearMethod:
        if _matches(self.ignored, name):
            return DENSE
        return next((method for entry, method in self.overrides if _matches([entry], name)), self.method)


def _named(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMED_MATRICES
    return ", ".join(names[:MAX_NAMED_MATRICES]) + (f" and {more} more" if more > 0 else "")


def _matches(entries: Iterable[str], name: str) -> bool:
    return any(
        bool(_expression(entry).match(name))
        if entry.startswith("re:")
        else f".{_usual_names(entry.strip('.'))}." in f".{name}."
        for entry in entries
    )


@cache  # `re.match` keeps 512 compiled expressions; a checkpoint may list more
def _expression(entry: str) -> re.Pattern[str]:
    return re.compile(_usual_names(entry.removeprefix("re:")))


def _usual_names(entry: str) -> str:
    """Return an entry with the model's names in place of those in Mixtral's checkpoints."""
    if MIXTRAL not in entry:
        return entry
    return _MIXTRAL_MATRIX.sub(lambda found: MIXTRAL_MATRICES[found[0]], entry.replace(MIXTRAL, "mlp"))

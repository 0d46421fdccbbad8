"""QuantizationConfig: the weight format of each linear layer of a model, chosen by the layer's name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tok_core.errors import ModelError
from tok_core.quantization.dense import DENSE
from tok_core.quantization.linear_method import LinearMethod


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """Methods of a model's linear layers, by their names in its checkpoint ("model.layers.3.mlp.down_proj").

    method   of all linear layers that are not ignored
    ignored  layers that stay dense. An entry is a name, consecutive components of names ("lm_head", "layers.3.mlp"),
             or "re:" and a regular expression that matches from the start of a name
    """

    method: LinearMethod = DENSE
    ignored: tuple[str, ...] = ()

    def method_of(self, names: Sequence[str]) -> LinearMethod:
        """Return the method of a layer that stacks the matrices `names`. Raise ModelError if only some are ignored."""
        ignored = [name for name in names if self._ignores(name)]
        if not ignored:
            return self.method
        if len(ignored) < len(names):
            others = ", ".join(name for name in names if name not in ignored)
            raise ModelError(
                f"quantization_config ignores {', '.join(ignored)} but not {others}; allowed: all or none of them, "
                "since they are computed as one layer"
            )
        return DENSE

    def _ignores(self, name: str) -> bool:
        return any(
            bool(re.match(entry.removeprefix("re:"), name)) if entry.startswith("re:") else f".{entry}." in f".{name}."
            for entry in self.ignored
        )

"""Define ModelShape: the sizes of a model, or of one rank's share, that determine its kernels' times."""

from __future__ import annotations

from dataclasses import dataclass

from tok_kernels.attention.shape import AttentionShape


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's attention shape, and the widths of the residual stream, the feed-forward layer and the logits."""

    attention: AttentionShape
    hidden_size: int
    intermediate_size: int
    vocab_size: int

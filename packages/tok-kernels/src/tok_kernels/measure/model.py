"""ModelShape: the sizes of a model, or of one rank's share of it, that its kernels' times follow from."""

from __future__ import annotations

from dataclasses import dataclass

from tok_kernels.attention.shape import AttentionShape


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Attention, and the widths of the residual stream, the feed-forward layer and the logits."""

    attention: AttentionShape
    hidden_size: int
    intermediate_size: int
    vocab_size: int

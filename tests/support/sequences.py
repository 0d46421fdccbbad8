"""Feed sequences to a model over a paged cache, as steps do.

Axes: S slots, P pages a slot, T tokens of the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tok_core.models import CausalLM
from tok_kernels import AttentionBatch, LayerCache


class Sequences:
    """A few sequences over one paged cache, one per slot; every forward feeds chunks to some of them.

    Pages are handed out in random order and hold NaN until written. With `scales`, float32 `[layers, 2, K]`, they hold
    float8; with `int8`, integers with a scale for each position and head.
    """

    def __init__(
        self,
        model: CausalLM,
        slots: int,
        page_size: int,
        max_len: int = 256,
        scales: Tensor | None = None,
        *,
        int8: bool = False,
    ) -> None:
        config = model.local
        pages = -(-max_len // page_size)
        order = torch.randperm(slots * pages, generator=torch.Generator().manual_seed(0))
        self.model, self.page_size = model, page_size
        self.page_table_SP = order.to(torch.int32).view(slots, pages)
        self.length = [0] * slots
        shape = (slots * pages, page_size, config.num_kv_heads, config.head_dim)
        if int8:
            of_tokens = (shape[0], shape[2], page_size)
            stored = torch.zeros((config.num_layers, 2, *shape), dtype=torch.int8)
            scale = torch.full((config.num_layers, 2, *of_tokens), torch.nan)
            self.caches = [
                LayerCache(k, v, k_token_scale=k_scale, v_token_scale=v_scale)
                for (k, v), (k_scale, v_scale) in zip(stored, scale, strict=True)
            ]
            return
        dtype = model.dtype if scales is None else torch.float8_e4m3fn
        self.caches = [
            LayerCache(*(torch.full(shape, torch.nan).to(dtype) for _ in range(2)), *of_layer)
            for of_layer in (((),) * config.num_layers if scales is None else scales)
        ]

    def feed(self, chunks: Sequence[tuple[int, Sequence[int]]], rows: Sequence[int] | None = None) -> Tensor:
        """Return logits after `(slot, tokens)` chunks; chunks of one token come first and run as decodes."""
        with torch.inference_mode():
            return self.model.logits(self.forward(chunks, rows))

    def forward(
        self,
        chunks: Sequence[tuple[int, Sequence[int]]],
        rows: Sequence[int] | None = None,
        stream: Tensor | None = None,
    ) -> Tensor:
        """Run the model on the chunks, or on the residual stream of the previous stage."""
        decodes = sum(1 for _, tokens in chunks if len(tokens) == 1)
        assert all(len(tokens) == 1 for _, tokens in chunks[:decodes])
        positions = [torch.arange(self.length[slot], self.length[slot] + len(t)) for slot, t in chunks]
        kv_index = [self._rows(slot, position) for (slot, _), position in zip(chunks, positions, strict=True)]
        for slot, tokens in chunks:
            self.length[slot] += len(tokens)
        with torch.inference_mode():
            hidden: Tensor = self.model(
                torch.tensor([token for _, tokens in chunks for token in tokens]) if stream is None else stream,
                torch.cat(positions),
                torch.cat(kv_index),
                self.caches,
                self._batch(chunks, decodes),
                None if rows is None else torch.tensor(rows, dtype=torch.int64),
            )
        return hidden

    def _rows(self, slot: int, position_T: Tensor) -> Tensor:
        page_T = self.page_table_SP[slot].long()[position_T // self.page_size]
        return page_T * self.page_size + position_T % self.page_size

    def _batch(self, chunks: Sequence[tuple[int, Sequence[int]]], decodes: int) -> AttentionBatch:
        counts = torch.tensor([0] + [len(tokens) for _, tokens in chunks], dtype=torch.int32)
        kv_len = torch.tensor([self.length[slot] for slot, _ in chunks], dtype=torch.int32)
        return AttentionBatch(
            page_table=self.page_table_SP,
            slots=torch.tensor([slot for slot, _ in chunks], dtype=torch.int32),
            q_start=counts.cumsum(0).to(torch.int32),
            kv_len=kv_len,
            kv_start=torch.zeros_like(kv_len),
            num_decode=decodes,
            max_q=int(counts.max()),
            max_kv=int(kv_len.max()),
        )

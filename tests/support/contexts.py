"""Lay out prompts and generated tokens over random pages, as penalties read them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tok_kernels import Contexts


def contexts_of(
    prompts: Sequence[Sequence[int]],
    generated: Sequence[Sequence[int]],
    device: torch.device,
    *,
    page_size: int = 4,
    more: int = 0,
) -> Contexts:
    """Return contexts of prompts followed by generated tokens; `max_len` exceeds the longest by `more`.

    Pages, slots and the contents of pages beyond a sequence are random.
    """
    tokens = [[*prompt, *rest] for prompt, rest in zip(prompts, generated, strict=True)]
    longest = max(map(len, tokens), default=0) + more
    source, width = torch.Generator().manual_seed(longest), -(-longest // page_size)
    slots = torch.randperm(len(tokens) + 2, generator=source)[: len(tokens)]
    pages = torch.randperm((len(tokens) + 2) * width, generator=source).view(len(tokens) + 2, width)
    largest = max((token for row in tokens for token in row), default=0)
    held = torch.randint(0, largest + 1, (pages.numel(), page_size), generator=source)
    for slot, row in zip(slots.tolist(), tokens, strict=True):
        line = torch.randint(0, largest + 1, (width * page_size,), generator=source)
        line[: len(row)] = torch.tensor(row, dtype=torch.int64)
        held[pages[slot]] = line.view(width, page_size)
    return Contexts(
        page_table=pages.int().to(device),
        token_of=held.flatten().to(device),
        page_size=page_size,
        slots=slots.to(device),
        length=torch.tensor([len(row) for row in tokens], dtype=torch.int64, device=device),
        prompt_len=torch.tensor([len(row) for row in prompts], dtype=torch.int64, device=device),
        max_len=longest,
    )

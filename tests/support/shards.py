"""Ranks of a cut vocabulary played one after the other, without processes: each is begun anew until it has heard all.

What a rank computes does not depend on how often it is begun, so that a rank can be run up to the first thing it does
not know yet, which is what the others tell at that point.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tok_kernels import Exchange, Sampled


class _Unheard(Exception):
    """The others have not told yet."""


class _Shards:
    exchange: Exchange | None = None

    def __init__(self, rank: int, ranks: int, first: int, heard: list[list[Tensor]]) -> None:
        self.rank, self.ranks, self.first = rank, ranks, first
        self._heard, self._turn = heard, 0

    def gather(self, x: Tensor) -> Tensor:
        turn, self._turn = self._turn, self._turn + 1
        if turn == len(self._heard):
            self._heard.append([])
        told = self._heard[turn]
        if len(told) == self.rank:
            told.append(x.clone())
        if len(told) < self.ranks:
            raise _Unheard
        return torch.stack(told)


def draw_together(logits_RV: Tensor, cuts: list[int], draw: Callable[[Tensor, _Shards], Sampled]) -> list[Sampled]:
    """What each rank draws; `cuts` are the entries at which the vocabulary is cut."""
    bounds = [0, *cuts, logits_RV.shape[1]]
    ranks, heard = len(bounds) - 1, list[list[Tensor]]()
    while True:
        found = []
        for rank in range(ranks):
            part = logits_RV[:, bounds[rank] : bounds[rank + 1]]
            try:
                found.append(draw(part, _Shards(rank, ranks, bounds[rank], heard)))
            except _Unheard:
                continue
        if len(found) == ranks:
            return found

"""Simulate ranks of a sharded vocabulary one after another, without processes.

A rank is deterministic. It runs up to the first gather that lacks values of other ranks, and is restarted until all
gathers are complete.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tok_kernels import Exchange, Sampled


class _Unheard(Exception):
    """Other ranks have not sent their values yet."""


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
    """Return what each rank samples; `cuts` are the entries at which the vocabulary is split."""
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

"""Shard plan: which heads, columns, vocabulary entries and layers belong to one worker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from tok_core.errors import InvalidField
from tok_core.mesh import RankCoordinates

if TYPE_CHECKING:
    from tok_core.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Slice:
    """The stretch `[start, stop)` of an axis of `size` entries."""

    start: int
    stop: int
    size: int

    @classmethod
    def whole(cls, size: int) -> Slice:
        """All of an axis."""
        return cls(0, size, size)

    @classmethod
    def of(cls, size: int, rank: int, ranks: int) -> Slice:
        """What `rank` has of an axis cut as evenly as can be; ranks' parts follow each other."""
        return cls(size * rank // ranks, size * (rank + 1) // ranks, size)

    @property
    def count(self) -> int:
        """Entries in it."""
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        return self.count == self.size

    def times(self, width: int) -> Slice:
        """The same of an axis whose entries are `width` wide."""
        return Slice(self.start * width, self.stop * width, self.size * width)


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One worker's own of a model.

    heads, kv_heads   query heads, and the key/value heads that they attend to: with more ranks than key/value heads
                      several ranks have the same one
    intermediate      columns between the two products of the MLP
    vocabulary        rows of the embedding and of the LM head
    layers            by their numbers in the model
    """

    place: RankCoordinates
    heads: Slice
    kv_heads: Slice
    intermediate: Slice
    vocabulary: Slice
    layers: range

    @classmethod
    def of(cls, config: ModelConfig, place: RankCoordinates) -> ShardPlan:
        """Raises InvalidField, naming `tp` or `pp`, where the model cannot be cut so."""
        _check_ranks(config, place.ranks)
        kv_heads = Slice.of(config.num_kv_heads, place.rank, place.ranks)
        if config.num_kv_heads < place.ranks:
            one = place.rank * config.num_kv_heads // place.ranks
            kv_heads = Slice(one, one + 1, config.num_kv_heads)
        return cls(
            place=place,
            heads=Slice.of(config.num_heads, place.rank, place.ranks),
            kv_heads=kv_heads,
            intermediate=Slice.of(config.intermediate_size, place.rank, place.ranks),
            vocabulary=Slice.of(config.vocab_size, place.rank, place.ranks),
            layers=stage_layers(config, place.stages)[place.stage],
        )

    def local(self, whole: ModelConfig) -> ModelConfig:
        """The model as this worker's attention and KV cache see it: its own layers, heads and columns only."""
        return replace(
            whole,
            num_layers=len(self.layers),
            windows=whole.windows[self.layers.start : self.layers.stop],
            num_heads=self.heads.count,
            num_kv_heads=self.kv_heads.count,
            intermediate_size=self.intermediate.count,
        )


def stage_layers(config: ModelConfig, stages: int) -> list[range]:
    """The layers of each pipeline stage, such that the costliest stage costs as little as can be.

    A cost is a number of multiplications a token: of a layer's weights, and of the LM head's in the last stage; the
    first stage also copies a row of the embedding. Among equally good cuts the most even one is taken. Raises
    InvalidField, naming `pp`, for more stages than layers.
    """
    layers = config.num_layers
    if stages > layers:
        raise InvalidField("pp", stages, f"at most {layers}, the model's layers")
    head = config.vocab_size * config.hidden_size
    counts = cut(layers, layer_cost(config), config.hidden_size, head, stages)
    ends = list(accumulate(counts, initial=0))
    return [range(start, stop) for start, stop in pairwise(ends)]


def layer_cost(config: ModelConfig) -> int:
    """Multiplications a token in the matrix products of one layer."""
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    return config.hidden_size * (heads * config.head_dim + 3 * config.intermediate_size)


def cut(layers: int, cost: int, first: int, last: int, stages: int) -> list[int]:
    """How many of `layers` layers, at `cost` each, go to each stage; `first` and `last` are what the outer stages
    cost besides.

    Only the number at the outer stages matters: those between cost the same a layer and are cut evenly.

    >>> cut(32, 1, 0, 3, 4)
    [8, 9, 9, 6]
    """
    if stages == 1:
        return [layers]
    between = stages - 2

    def even(count: int) -> list[int]:
        return [count * (i + 1) // between - count * i // between for i in range(between)][::-1]

    def candidates() -> Iterator[list[int]]:
        for begin in range(1, layers - stages + 2):
            if between == 0:
                yield [begin, layers - begin]
                continue
            yield from ([begin, *even(rest), layers - begin - rest] for rest in range(between, layers - begin))

    def badness(counts: Sequence[int]) -> tuple[int, int]:
        costs = [count * cost for count in counts]
        costs[0] += first
        costs[-1] += last
        return max(costs), sum(value * value for value in costs)

    return min(candidates(), key=badness)


def _check_ranks(config: ModelConfig, ranks: int) -> None:
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % ranks:
        raise InvalidField("tp", ranks, f"divisors of {heads}, the model's query heads")
    if kv_heads % ranks and ranks % kv_heads:
        raise InvalidField("tp", ranks, f"divisors and multiples of {kv_heads}, the model's key/value heads")
    if config.intermediate_size % ranks:
        raise InvalidField("tp", ranks, f"divisors of {config.intermediate_size}, the model's intermediate size")
    if config.vocab_size < ranks:
        raise InvalidField("tp", ranks, f"at most {config.vocab_size}, the model's vocabulary")

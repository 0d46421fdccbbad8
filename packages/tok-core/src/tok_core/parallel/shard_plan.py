"""Compute the heads, columns, vocabulary entries and layers that each worker holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from tok_core.config import RankCoordinates
from tok_core.errors import InvalidField

if TYPE_CHECKING:
    from tok_core.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Slice:
    """Range `[start, stop)` of an axis of `size` entries."""

    start: int
    stop: int
    size: int

    @classmethod
    def whole(cls, size: int) -> Slice:
        """Return the whole axis."""
        return cls(0, size, size)

    @classmethod
    def of(cls, size: int, rank: int, ranks: int) -> Slice:
        """Return `rank`'s part of an axis that is divided as evenly as possible, in the order of ranks."""
        return cls(size * rank // ranks, size * (rank + 1) // ranks, size)

    @property
    def count(self) -> int:
        """Return the number of entries in the range."""
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        return self.count == self.size

    def times(self, width: int) -> Slice:
        """Return the same range of an axis on which each entry takes `width` elements."""
        return Slice(self.start * width, self.stop * width, self.size * width)


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One worker's shard of a model.

    heads, kv_heads   query heads, and the key/value heads that they attend to; with more ranks than key/value heads
                      several ranks hold the same key/value head
    intermediate      columns between the MLP's two GEMMs
    expert_slots      places for experts and their copies in each layer that has experts
    expert_columns    columns between the two GEMMs of each expert
    vocabulary        rows of the embedding and of the LM head
    layers            indices in the model
    """

    coordinates: RankCoordinates
    heads: Slice
    kv_heads: Slice
    intermediate: Slice
    expert_slots: Slice
    expert_columns: Slice
    vocabulary: Slice
    layers: range

    @classmethod
    def of(cls, config: ModelConfig, coordinates: RankCoordinates) -> ShardPlan:
        """Return the shard of the worker at `coordinates`. Raise InvalidField if `tp`, `pp` or `ep` does not fit."""
        _check_ranks(config, coordinates)
        rank = coordinates.rank, coordinates.ranks
        kv_heads = Slice.of(config.num_kv_heads, *rank)
        if config.num_kv_heads < coordinates.ranks:
            head = coordinates.rank * config.num_kv_heads // coordinates.ranks
            kv_heads = Slice(head, head + 1, config.num_kv_heads)
        experts, columns = (config.moe.experts, config.moe.intermediate_size) if config.moe else (0, 0)
        slots = experts + coordinates.redundant_experts
        return cls(
            coordinates=coordinates,
            heads=Slice.of(config.num_heads, *rank),
            kv_heads=kv_heads,
            intermediate=Slice.of(config.intermediate_size, *rank),
            expert_slots=Slice.of(slots, *rank) if coordinates.ep else Slice.whole(slots),
            expert_columns=Slice.whole(columns) if coordinates.ep else Slice.of(columns, *rank),
            vocabulary=Slice.of(config.vocab_size, *rank),
            layers=stage_layers(config, coordinates.stages)[coordinates.stage],
        )

    def part(self, size: int) -> Slice:
        """Return this rank's part of an axis that the ranks divide evenly."""
        return Slice.of(size, self.coordinates.rank, self.coordinates.ranks)

    def local(self, whole: ModelConfig) -> ModelConfig:
        """Return the config that this worker's attention and KV cache see: its own layers, heads and columns only."""
        return replace(
            whole,
            num_layers=len(self.layers),
            windows=whole.windows[self.layers.start : self.layers.stop],
            num_heads=self.heads.count,
            num_kv_heads=self.kv_heads.count,
            intermediate_size=self.intermediate.count,
        )


def stage_layers(config: ModelConfig, stages: int) -> list[range]:
    """Return the layers of each pipeline stage, with the lowest possible cost of the costliest stage.

    The cost is the number of multiplications per token, by the weights of layers and, in the last stage, of the LM
    head; the first stage also copies a row of the embedding. Ties go to the most even partition. Raises InvalidField,
    which names `pp`, for more stages than layers.
    """
    layers = config.num_layers
    if stages > layers:
        raise InvalidField("pp", stages, f"at most {layers}, the model's layers")
    head = config.vocab_size * config.hidden_size
    counts = layers_per_stage(layers, layer_cost(config), config.hidden_size, head, stages)
    ends = list(accumulate(counts, initial=0))
    return [range(start, stop) for start, stop in pairwise(ends)]


def layer_cost(config: ModelConfig) -> int:
    """Return the multiplications per token in the GEMMs of a layer: the mean, if only some layers have experts."""
    heads, columns = 2 * config.num_heads + 2 * config.num_kv_heads, config.intermediate_size
    if config.moe is not None:
        sparse = len(config.moe.layers)
        columns = (columns * (config.num_layers - sparse) + config.moe.active_columns * sparse) // config.num_layers
    return config.hidden_size * (heads * config.head_dim + 3 * columns)


def layers_per_stage(layers: int, cost: int, first: int, last: int, stages: int) -> list[int]:
    """Return how many of `layers` layers, at `cost` each, each stage gets.

    `first` and `last` are additional costs of the first and last stage. The search varies only the numbers of layers
    in these two stages; layers are spread evenly over the stages in between.

    >>> layers_per_stage(32, 1, 0, 3, 4)
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

    def cost_of(counts: Sequence[int]) -> tuple[int, int]:
        costs = [count * cost for count in counts]
        costs[0] += first
        costs[-1] += last
        return max(costs), sum(value * value for value in costs)

    return min(candidates(), key=cost_of)


def _check_ranks(config: ModelConfig, coordinates: RankCoordinates) -> None:
    ranks, heads, kv_heads = coordinates.ranks, config.num_heads, config.num_kv_heads
    if heads % ranks:
        raise InvalidField("tp", ranks, f"divisors of {heads}, the model's query heads")
    if kv_heads % ranks and ranks % kv_heads:
        raise InvalidField("tp", ranks, f"divisors and multiples of {kv_heads}, the model's key/value heads")
    if coordinates.ep and config.moe is None:
        raise InvalidField("ep", True, "false for a model without experts")
    sizes = {}
    if config.moe is None or len(config.moe.layers) < config.num_layers:
        sizes["intermediate size"] = config.intermediate_size
    if config.moe is not None:
        if coordinates.redundant_experts:
            _check_redundant(config.moe.experts, coordinates)
        elif coordinates.ep:
            sizes["experts (with ep)"] = config.moe.experts
        else:
            sizes["experts' intermediate size"] = config.moe.intermediate_size
        sizes["shared expert's intermediate size"] = config.moe.shared_intermediate_size
    for name, size in sizes.items():
        if size % ranks:
            raise InvalidField("tp", ranks, f"divisors of {size}, the model's {name}")
    if config.vocab_size < ranks:
        raise InvalidField("tp", ranks, f"at most {config.vocab_size}, the model's vocabulary")


def _check_redundant(experts: int, coordinates: RankCoordinates) -> None:
    copies, ranks = coordinates.redundant_experts, coordinates.ranks
    most = experts * (ranks - 1)
    if (experts + copies) % ranks or copies > most:
        first = -experts % ranks or ranks
        allowed = f"{first}, {first + ranks}, …, at most {most}, for the model's {experts} experts on {ranks} ranks"
        raise InvalidField("redundant_experts", copies, allowed)

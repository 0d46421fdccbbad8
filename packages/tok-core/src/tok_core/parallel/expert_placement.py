"""Place experts and their copies in the slots of ranks, so that all ranks compute about equally many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """The expert of each of the S slots of all ranks: `expert_S`, the slots of rank 0 first, equally many of each rank.

    Each expert is in at least one slot, and in at most one slot of a rank.
    """

    expert_S: tuple[int, ...]
    ranks: int = 1

    @classmethod
    def initial(cls, experts: int, slots: int, ranks: int) -> ExpertPlacement:
        """Return the placement while no load is known: in order, or with copies as if all experts had equal loads."""
        if slots == experts:
            return cls(tuple(range(experts)), ranks)
        return cls.balanced([1.0] * experts, slots, ranks)

    @classmethod
    def balanced(cls, load_E: Sequence[float], slots: int, ranks: int) -> ExpertPlacement:
        """Return a placement for tokens that choose expert e in proportion to `load_E[e]`.

        Greedy, as EPLB of DeepSeek-V3 (2024): each further copy is of the expert with the largest load per copy; then
        the copies, those with the largest load first, go to the rank with the least load.

        >>> ExpertPlacement.balanced([6.0, 1.0, 2.0, 1.0], slots=6, ranks=2).expert_S
        (0, 1, 2, 0, 2, 3)
        """
        experts = range(len(load_E))
        copies = [1] * len(load_E)
        for _ in range(slots - len(load_E)):
            candidates = [expert for expert in experts if copies[expert] < ranks]
            copies[max(candidates, key=lambda expert: load_E[expert] / copies[expert])] += 1
        share_E = [load / count for load, count in zip(load_E, copies, strict=True)]
        held: list[set[int]] = [set() for _ in range(ranks)]
        load_R = [0.0] * ranks

        def put(expert: int, rank: int) -> None:
            held[rank].add(expert)
            load_R[rank] += share_E[expert]

        for expert in sorted(experts, key=lambda expert: -share_E[expert]):
            for _ in range(copies[expert]):
                free = [rank for rank in range(ranks) if len(held[rank]) < slots // ranks]
                lacking = [rank for rank in free if expert not in held[rank]]
                if lacking:
                    put(expert, min(lacking, key=lambda rank: load_R[rank]))
                    continue
                # All ranks with free slots hold the expert: a full rank that does not moves another one there.
                full = next(rank for rank in range(ranks) if expert not in held[rank])
                moved = max(held[full] - held[free[0]])
                held[full].remove(moved)
                load_R[full] -= share_E[moved]
                put(moved, free[0])
                put(expert, full)
        return cls(tuple(expert for experts_of_rank in held for expert in sorted(experts_of_rank)), ranks)

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """Return the experts of the slots of a rank."""
        size = len(self.expert_S) // self.ranks
        return self.expert_S[rank * size : (rank + 1) * size]

    def copies(self) -> list[list[int]]:
        """Return for each expert the number of its copies, then their slots, then zeros: `ranks + 1` numbers."""
        slots: list[list[int]] = [[] for _ in range(max(self.expert_S) + 1)]
        for slot, expert in enumerate(self.expert_S):
            slots[expert].append(slot)
        return [[len(own), *own, *[0] * (self.ranks - len(own))] for own in slots]

    def imbalance(self, load_E: Sequence[float]) -> float:
        """Return the load of the busiest rank, divided by the mean load of a rank."""
        share_E = [load / count for load, (count, *_) in zip(load_E, self.copies(), strict=True)]
        busiest = max(sum(share_E[expert] for expert in self.of_rank(rank)) for rank in range(self.ranks))
        return busiest * self.ranks / sum(load_E)

"""Place experts and copies of them in slots of ranks, so that each rank computes about equally many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """Experts of the slots of all ranks, S in all: `expert_S`, those of rank 0 first, equally many on each rank.

    Each expert is in at least one slot, and in at most one of a rank.
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
            most = max((one for one in experts if copies[one] < ranks), key=lambda one: load_E[one] / copies[one])
            copies[most] += 1
        share_E = [load / count for load, count in zip(load_E, copies, strict=True)]
        held: list[set[int]] = [set() for _ in range(ranks)]
        load_R = [0.0] * ranks

        def put(expert: int, rank: int) -> None:
            held[rank].add(expert)
            load_R[rank] += share_E[expert]

        for expert in sorted(experts, key=lambda one: -share_E[one]):
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
        return cls(tuple(expert for one in held for expert in sorted(one)), ranks)

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """Return the experts of the slots of a rank."""
        size = len(self.expert_S) // self.ranks
        return self.expert_S[rank * size : (rank + 1) * size]

    def copies(self) -> list[list[int]]:
        """Return for each expert the number of its copies, then their slots, then zeros: `ranks + 1` numbers."""
        slots: list[list[int]] = [[] for _ in range(max(self.expert_S) + 1)]
        for slot, expert in enumerate(self.expert_S):
            slots[expert].append(slot)
        return [[len(one), *one, *[0] * (self.ranks - len(one))] for one in slots]

    def imbalance(self, load_E: Sequence[float]) -> float:
        """Return the load of the rank with most, divided by that of a rank in the mean."""
        share_E = [load / count for load, (count, *_) in zip(load_E, self.copies(), strict=True)]
        most = max(sum(share_E[expert] for expert in self.of_rank(rank)) for rank in range(self.ranks))
        return most * self.ranks / sum(load_E)

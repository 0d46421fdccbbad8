"""Choose the token budget of pipeline steps so that successive steps take about equally long.

A stage that has done with a long step waits for the next of a short one, and the sequences of the short one for the
long one to pass all stages. Prompts come when they come, or when others have left room for them: what a step takes of
them is therefore bounded by what steps have lately needed, and the rest follows in the next ones.
"""

from __future__ import annotations

MIN_STEP_TOKENS = 256  # tokens of a step: with fewer, reading the weights takes longer than the products


class TokenBudget:
    """Largest number of tokens in a step, between MIN_STEP_TOKENS and `most`.

    It grows while prompts wait for it and shrinks while none does, each time by 1 / (2 · `microbatches`) of itself.
    With one microbatch it is `most`.
    """

    def __init__(self, most: int, microbatches: int) -> None:
        self._most = most
        self._bound = float(most)
        self._change = 0.5 / microbatches if microbatches > 1 else 0.0

    @property
    def tokens(self) -> int:
        """What the next step may have."""
        return int(self._bound)

    def observe(self, *, exhausted: bool) -> None:
        """Whether prompts would have filled more than the last step was allowed."""
        self._bound *= 1 + self._change if exhausted else 1 - self._change
        self._bound = min(max(self._bound, MIN_STEP_TOKENS), self._most)

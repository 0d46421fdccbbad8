"""Choose the token budget of pipeline steps so that successive steps take about equally long.

Steps of different length make pipeline stages wait for each other, and the sequences of a short step wait until a long
one has passed all stages. Prompts arrive irregularly, or start when others have freed pages. The prompt tokens of a
step are therefore bounded by what recent steps have needed; the rest follows in the next steps.
"""

from __future__ import annotations

MIN_STEP_TOKENS = 256  # tokens of a step: with fewer, reading the weights takes longer than the GEMMs


class TokenBudget:
    """Largest number of tokens in a step, between MIN_STEP_TOKENS and `max_tokens`.

    It grows while prompts wait for it and shrinks otherwise, with each step by 1 / (2 · `microbatches`) of itself. With
    one microbatch it is `max_tokens`.
    """

    def __init__(self, max_tokens: int, microbatches: int) -> None:
        self._max_tokens = max_tokens
        self._bound = float(max_tokens)
        self._change = 0.5 / microbatches if microbatches > 1 else 0.0

    @property
    def tokens(self) -> int:
        """Return the largest number of tokens of the next step."""
        return int(self._bound)

    def observe(self, *, exhausted: bool) -> None:
        """Adapt to a step. `exhausted`: prompts would have filled more than it was allowed."""
        self._bound *= 1 + self._change if exhausted else 1 - self._change
        self._bound = min(max(self._bound, MIN_STEP_TOKENS), self._max_tokens)

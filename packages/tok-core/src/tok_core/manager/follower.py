"""Follower: the place of one guided sequence in its grammar."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tok_core.manager.masks import Mask

if TYPE_CHECKING:
    from tok_core.grammar.compiler import Compiled


class Follower:
    """It has followed all tokens that the sequence has, and those that are `given`.

    mask   what the sequence may draw next
    given  tokens, the last first, that it is to draw one by one although it has no choice
    free   what it may draw after these
    over   whether its text is at its end
    """

    __slots__ = ("free", "given", "guide", "mask", "matcher", "over")

    def __init__(self, guide: Compiled, first: Mask) -> None:
        self.guide = guide
        self.matcher = guide.matcher()
        self.mask = self.free = first
        self.given: list[int] = []
        self.over = False

    def settled(self) -> list[int]:
        """Tokens that have to come now, which it follows: the only one, or those of the text that is the only one, as
        the tokenizer would write it. `mask` is the one before them."""
        tokens = [self.mask.only] if self.mask.only >= 0 else self._spelt() if self.mask.alike else []
        for at, token in enumerate(tokens):
            if not self.matcher.accept_token(token):
                return tokens[:at]
        self.over = bool(tokens) and self.matcher.is_terminated()
        return tokens

    def _spelt(self) -> list[int]:
        text = self.matcher.find_jump_forward_string()
        return list(self.guide.lead(text)) if len(text) > 1 else []

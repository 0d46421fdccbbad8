"""Restrict the tokens that requests may sample, beside grammars: sets of allowed tokens, and banned sequences.

Legend: W words of a packed set of tokens (token t is in the set if bit t mod 32 of word t div 32 is set), n sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tok_core.manager.requests import Request
from tok_core.messages import EMPTY, Int32


class StepMasks(NamedTuple):
    """Masks of a step's masked rows.

    bitmask     int32 [m, W]: the distinct masks, as packed sets of tokens
    mask_index  int32 [n]: index in `bitmask` of each row's mask
    """

    bitmask: Int32
    mask_index: Int32


NO_MASKS = StepMasks(EMPTY.reshape(0, 0), EMPTY)


class AllowedTokens:
    """Sets of allowed tokens of open requests; equal ones share a number, which is a row of packed words."""

    def __init__(self, vocab_size: int) -> None:
        self._words: Int32 = np.zeros((4, -(-vocab_size // 32)), np.int32)
        self._free = list(range(len(self._words)))[::-1]
        self._numbers: dict[frozenset[int], int] = {}
        self._users: dict[int, int] = {}

    def acquire(self, request: Request) -> None:
        """Set the request's `allowed_set`; each call needs one `release`."""
        if request.params.allowed_token_ids is None:
            return
        allowed = frozenset(request.params.allowed_token_ids)
        if allowed not in self._numbers:
            self._numbers[allowed] = self._add(allowed)
        request.allowed_set = self._numbers[allowed]
        self._users[request.allowed_set] = self._users.get(request.allowed_set, 0) + 1

    def release(self, request: Request) -> None:
        """Release the request's set; its row is reused when no request needs it."""
        number = request.allowed_set
        if number < 0:
            return
        self._users[number] -= 1
        if not self._users[number]:
            del self._users[number], self._numbers[frozenset(request.params.allowed_token_ids or ())]
            self._free.append(number)

    def words(self, numbers: Int32) -> Int32:
        """Return the packed words of these sets, int32 [n, W]."""
        return self._words[numbers]

    def restrict(self, request: Request, words: Int32, tokens: Sequence[int]) -> Int32:
        """Return the tokens of a packed set, int32 [W], that the request may sample after it has generated `tokens`."""
        found = words & self._words[request.allowed_set] if request.allowed_set >= 0 else words.copy()
        octets = found.view(np.uint8)
        for *before, last in request.banned:
            if len(before) <= len(tokens) and list(tokens[len(tokens) - len(before) :]) == before:
                octets[last // 8] &= ~np.uint8(1 << last % 8)
        return found

    def _add(self, allowed: frozenset[int]) -> int:
        if not self._free:
            self._free = list(range(2 * len(self._words) - 1, len(self._words) - 1, -1))
            self._words = np.concatenate([self._words, np.zeros_like(self._words)])
        number = self._free.pop()
        bits = np.zeros(32 * self._words.shape[1], np.uint8)
        bits[list(allowed)] = 1
        self._words[number] = np.packbits(bits, bitorder="little").view(np.int32)
        return number

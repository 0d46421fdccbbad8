"""Learn which token follows which n-gram, and draft continuations of sequences.

Legend: n sequences or tokens, W = MAX_CONTEXT tokens of a window, C lengths of contexts.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tok_core.messages import Int32

UInt64 = NDArray[np.uint64]

CONTEXTS: Final = np.array((1, 2, 4, 8))  # lengths of contexts, in tokens
MAX_CONTEXT: Final = 8
# The score of a context is its count plus the bonus of its length. The context of the highest score predicts; of equal
# scores, the shorter context does. Without a bonus, a quarter fewer tokens of this repository's texts are accepted.
BONUS: Final = np.array((0, 1, 2, 3))[:, None]
RISE: Final = 2  # added to a count when its token follows again; so a token of a third of the cases keeps its entry
MAX_COUNT: Final = 15  # limit of a count, so that a token that no longer follows is soon replaced
MAX_SCORE: Final = MAX_COUNT + 3
ENTRY_BITS: Final = 22  # the table has 2 ** 22 entries: 36 MiB once all of them are in use
NO_TOKEN: Final = -1

_MULTIPLIER: Final = 0x9E3779B97F4A7C15  # 2 ** 64 / golden ratio, odd: multiplicative hashing (Knuth)
# A row for each context: powers of the multiplier for its tokens, and 0 for older tokens of the window.
_POWERS: Final = np.tile(
    np.array([pow(_MULTIPLIER, i + 1, 1 << 64) for i in range(MAX_CONTEXT, 0, -1)], np.uint64), (len(CONTEXTS), 1)
)
_POWERS[np.arange(MAX_CONTEXT) < MAX_CONTEXT - CONTEXTS[:, None]] = 0
_LENGTH_KEYS: Final = np.array([0xD1B54A32D192ED03 * int(i) % 2**64 for i in CONTEXTS], np.uint64)[:, None]


class Predictions(NamedTuple):
    """Predicted tokens and the scores of their contexts; NO_TOKEN and 0 where no context predicts."""

    token: Int32
    score: Int32


class NgramIndex:
    """Hash table from a context, the last 1, 2, 4 or 8 tokens of a sequence, to the token that mostly follows it.

    Every sequence belongs to a group, a number. The sequences of a group, such as all with one salt, learn from each
    other, finished ones included, and from no other group.

    An entry holds one context, the token predicted after it, and a count. The count rises by RISE when this token
    follows again, and falls by 1 when another token does. At 0 the other token replaces it, with a count of 1. A new
    context replaces the one in its entry, so memory is bounded and unused contexts disappear. Two contexts are confused
    if their hashes agree in all of 54 bits. A wrong draft costs time only, since drafts are verified.

    The tokens of one call of `add` do not see each other. If equal contexts occur in a call, the last one counts.
    """

    def __init__(self, entry_bits: int = ENTRY_BITS) -> None:
        self._shift = np.uint64(64 - entry_bits)
        self._fingerprint = np.zeros(1 << entry_bits, np.uint32)
        self._token = np.zeros(1 << entry_bits, np.int32)
        self._count = np.zeros(1 << entry_bits, np.uint8)  # 0: the entry is empty

    def add(self, group_n: UInt64, window_Wn: Int32, token_n: Int32) -> Predictions:
        """Learn that each token follows its window; return the tokens that the index predicted before.

        Windows that reach beyond the start of a sequence are padded by NO_TOKEN.
        """
        at, fingerprint = self._entries(group_n, window_Wn.astype(np.uint64))
        token, count = self._look_up(at, fingerprint)
        predicted = _best(token, count)
        up, down = np.minimum(count + RISE, MAX_COUNT), np.maximum(count, 1) - 1
        count = np.where((token == token_n) & (count > 0), up, down)
        replaced = count == 0
        self._fingerprint[at] = fingerprint
        self._token[at] = np.where(replaced, token_n, token)
        self._count[at] = count + replaced
        return predicted

    def add_text(self, group: int, tokens: Int32) -> None:
        """Learn every token of a text."""
        padded = np.concatenate((np.full(MAX_CONTEXT, NO_TOKEN, np.int32), tokens))
        windows = np.lib.stride_tricks.sliding_window_view(padded, MAX_CONTEXT)[1:-1]
        self.add(np.full(len(windows), group, np.uint64), np.ascontiguousarray(windows.T), tokens[1:])

    def draft(self, group_n: UInt64, window_Wn: Int32, count: int) -> Predictions:
        """Return up to `count` tokens that may follow each window, and their scores, both int32 `[n, count]`."""
        history = np.empty((MAX_CONTEXT + count, len(group_n)), np.uint64)
        history[:MAX_CONTEXT] = window_Wn
        drafts = Predictions(*(np.empty((count, len(group_n)), np.int32) for _ in range(2)))
        for i in range(count):
            predicted = _best(*self._look_up(*self._entries(group_n, history[i : i + MAX_CONTEXT])))
            drafts.token[i], drafts.score[i] = predicted
            history[MAX_CONTEXT + i] = predicted.token
            if not predicted.score.any():
                drafts.score[i:] = 0
                break
        ended = np.logical_or.accumulate(drafts.score == 0, axis=0)
        drafts.token[ended], drafts.score[ended] = NO_TOKEN, 0
        return Predictions(drafts.token.T, drafts.score.T)

    def _look_up(self, at: UInt64, fingerprint: NDArray[np.uint32]) -> tuple[Int32, NDArray[np.uint8]]:
        """Return tokens and counts of the entries; the count is 0 if an entry is empty or holds another context."""
        count = self._count[at]
        count[self._fingerprint[at] != fingerprint] = 0
        return self._token[at], count

    def _entries(self, group_n: UInt64, window_Wn: UInt64) -> tuple[UInt64, NDArray[np.uint32]]:
        """Return the entries of the contexts that end a window, and the fingerprints of these contexts, `[C, n]`."""
        state: UInt64 = ((_POWERS @ window_Wn + group_n) ^ _LENGTH_KEYS) * np.uint64(_MULTIPLIER)
        state ^= state >> np.uint64(32)
        return state >> self._shift, state.astype(np.uint32)


def _best(token_Cn: Int32, count_Cn: NDArray[np.uint8]) -> Predictions:
    """Return each token of the context of the highest score; NO_TOKEN if no context is known."""
    score_Cn = np.where(count_Cn > 0, count_Cn + BONUS, 0)
    best, every = score_Cn.argmax(axis=0), np.arange(score_Cn.shape[1])
    score = score_Cn[best, every].astype(np.int32)
    token: Int32 = np.where(score > 0, token_Cn[best, every], np.int32(NO_TOKEN))
    return Predictions(token, score)

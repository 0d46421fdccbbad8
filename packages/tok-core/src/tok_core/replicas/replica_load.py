"""Estimate the load of one replica: the tokens that its open requests still have to compute.

A request's count falls with each report of its tokens, and the rest is removed with the request. So the sum is always
over open requests, however they end. Axes: U requests of a report, R rows, one for each open request.
"""

from __future__ import annotations

import math

import numpy as np

from tok_core.messages import Int64

MIN_ROWS = 64  # minimum number of rows
INITIAL_MEAN_TOKENS = 256.0  # assumed mean length of an output before any has ended
MIN_ENDS = 1e-6  # lower limit of the decayed number of ends, in case no output ends on its own
LENGTH_DECAY = 1 - 1 / 1024  # decay of the length statistics with each output that ends


class ReplicaLoad:
    """Load of one replica; `tokens` is the sum over its open requests. For one thread at a time."""

    def __init__(self) -> None:
        self.tokens = 0
        self._row: dict[int, int] = {}  # by rid
        self._free = list(range(MIN_ROWS))
        self._left: Int64 = np.zeros(MIN_ROWS, np.int64)  # [R] tokens to come
        self._prompt: Int64 = np.zeros(MIN_ROWS, np.int64)  # [R] prompt tokens among `_left`
        self._samples: Int64 = np.zeros(MIN_ROWS, np.int64)  # [R] samples that have not ended
        self._expected: Int64 = np.zeros(MIN_ROWS, np.int64)  # [R] tokens expected of each sample

    def add(self, rid: int, prompt: int, samples: int, expected_tokens: int) -> None:
        """Add a request, or further samples of it.

        prompt           tokens of the prompt
        samples          number of samples
        expected_tokens  tokens expected of each sample, at least 1
        """
        if rid not in self._row:
            self._row[rid] = self._new_row()
        row, tokens = self._row[rid], prompt + samples * expected_tokens
        self._left[row] += tokens
        self._prompt[row] += prompt
        self._samples[row] += samples
        self._expected[row] = expected_tokens
        self.tokens += tokens

    def report(self, rids: list[int], counts: Int64) -> None:
        """Subtract `counts[u]` reported tokens of request `rids[u]`, and its prompt; the rids are distinct."""
        rows = np.array([self._row.get(rid, -1) for rid in rids], np.int64)
        known = rows >= 0
        rows = rows[known]
        done = counts[known] + self._prompt[rows]
        self._prompt[rows] = 0
        # A sample that runs for longer than expected counts as having one token left.
        left = np.maximum(self._left[rows] - done, self._samples[rows])
        self.tokens += int((left - self._left[rows]).sum())
        self._left[rows] = left

    def end(self, rid: int, samples: int) -> None:
        """Subtract the expected remaining tokens of `samples` samples of the request, which have ended."""
        row = self._row.get(rid)
        if row is not None:
            self._samples[row] -= samples
            limit = self._prompt[row] + self._samples[row] * self._expected[row]
            left = min(int(self._left[row]), int(limit))
            self.tokens += left - int(self._left[row])
            self._left[row] = left

    def remove(self, rid: int) -> None:
        """Remove the request, if it is open."""
        row = self._row.pop(rid, None)
        if row is not None:
            self.tokens -= int(self._left[row])
            for column in (self._left, self._prompt, self._samples, self._expected):
                column[row] = 0
            self._free.append(row)

    def __len__(self) -> int:
        return len(self._row)

    def _new_row(self) -> int:
        if not self._free:
            old = len(self._left)
            more = np.zeros(old, np.int64)
            self._left, self._prompt, self._samples, self._expected = (
                np.concatenate((column, more)) for column in (self._left, self._prompt, self._samples, self._expected)
            )
            self._free = list(range(old, 2 * old))
        return self._free.pop()


class OutputLengths:
    """Geometric model of output lengths, learned from ended outputs: every token is the last with equal probability.

    The probability is the number of outputs that ended on their own, divided by the number of tokens of all outputs,
    including outputs cut off by their limit.
    """

    def __init__(self) -> None:
        self._tokens, self._ends = INITIAL_MEAN_TOKENS, 1.0

    def observe(self, tokens: int, *, ended: bool) -> None:
        """Count an output of `tokens` tokens that `ended` on its own, or else was cut off by its limit."""
        self._tokens = self._tokens * LENGTH_DECAY + tokens
        self._ends = max(self._ends * LENGTH_DECAY + ended, MIN_ENDS)

    def expected(self, limit: int) -> int:
        """Return the expected number of tokens of an output that is cut off at `limit`, at least 1."""
        mean = self._tokens / self._ends
        return max(1, round(-mean * math.expm1(-limit / mean)))

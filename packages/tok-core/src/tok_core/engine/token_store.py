"""Store the tokens of unstreamed samples, one report at a time, and detokenise the samples that end."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from tok_core.messages import EMPTY, Finished, Int32, Int64
from tok_core.sampling_params import SamplingParams
from tok_core.text import Tokenizer

BLOCK_TOKENS = 64
MIN_ROWS = 64  # allocated rows


class TokenStore:
    """Thread-safe store of the tokens of open samples, in the order in which they were reported."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: deque[tuple[int, int]] = deque()  # rid and number of samples of requests not yet in `_rows`
        self._rows: dict[int, range] = {}  # by rid
        self._next_row = 0
        self._count: Int64 = np.zeros(MIN_ROWS, np.int64)  # [R] tokens so far
        self._block: Int64 = np.full(MIN_ROWS, -1, np.int64)  # [R] the last block; -1: none
        self._tokens: Int32 = np.empty((0, BLOCK_TOKENS), np.int32)  # [K, BLOCK_TOKENS]
        self._before: Int64 = np.empty(0, np.int64)  # [K] the row's block before this one; -1: none
        self._free: list[int] = []

    def open(self, rid: int, samples: int) -> None:
        """Keep the request's tokens from now on. Takes no lock: the next call of another method assigns its rows."""
        self._opened.append((rid, samples))

    def append(self, rids: list[int], which: Int64, sample: Int32, token: Int32) -> list[int]:
        """Append `token[i]` to sample `sample[i]` of request `rids[which[i]]`; no sample may occur twice.

        Tokens of requests that are not open are dropped. Returns the rids of samples that got their first token.
        """
        with self._lock:
            self._enter()
            if not self._rows:
                return []
            first = np.array([rows.start if (rows := self._rows.get(rid)) else -1 for rid in rids], np.int64)[which]
            kept = first >= 0
            if not kept.all():
                first, which, sample, token = first[kept], which[kept], sample[kept], token[kept]
            row = first + sample
            at = self._count[row]
            within = at % BLOCK_TOKENS
            self._add_blocks(row[within == 0])
            self._tokens[self._block[row], within] = token
            self._count[row] = at + 1
            return [rids[i] for i in sorted(set(which[at == 0].tolist()))]

    def take(self, rid: int, sample: int) -> Int32:
        """Remove the tokens of a sample of an open request, and return a copy of them."""
        with self._lock:
            self._enter()
            row = self._rows[rid][sample]
            count = int(self._count[row])
            blocks = self._give_back(row)
            return self._tokens[blocks].reshape(-1)[:count] if blocks else EMPTY

    def count(self, rid: int, sample: int) -> int:
        """Return the number of tokens of a sample of an open request."""
        with self._lock:
            self._enter()
            return int(self._count[self._rows[rid][sample]])

    def read(self, rids: list[int], samples: list[int]) -> tuple[list[int], Int32, Int64]:
        """Return the tokens of sample `samples[u]` of request `rids[u]`, for each u whose request is open.

        Returns the list of these u, a copy of their tokens, concatenated, and the number of tokens of each u.
        """
        with self._lock:
            self._enter()
            first = np.array([rows.start if (rows := self._rows.get(rid)) else -1 for rid in rids], np.int64)
            known = (first >= 0).nonzero()[0]
            row = first[known] + np.array(samples, np.int64)[known]
            counts = self._count[row]
            return known.tolist(), self._gather(self._block[row], counts), counts

    def drop(self, rid: int, samples: Iterable[int]) -> None:
        """Drop the tokens of samples of an open request."""
        with self._lock:
            self._enter()
            first = self._rows[rid].start
            self._give_back_all([first + sample for sample in samples])

    def close(self, rid: int) -> None:
        """Close the request, if it is open, and drop its tokens."""
        with self._lock:
            self._enter()
            rows = self._rows.pop(rid, None)
            if rows is not None and len(rows) == 1:
                self._give_back(rows.start)
            elif rows is not None:
                self._give_back_all(slice(rows.start, rows.stop))

    def close_all(self, rids: Iterable[int]) -> None:
        """Close many requests, without a Python loop over their samples."""
        with self._lock:
            self._enter()
            rows: list[int] = []
            for rid in rids:
                rows += self._rows.pop(rid, ())
            if rows:
                self._give_back_all(rows)

    def _enter(self) -> None:
        """Assign rows to requests that have been opened."""
        while self._opened:
            rid, samples = self._opened.popleft()
            if self._next_row + samples > len(self._count):
                self._make_rows(samples)
            self._rows[rid] = range(self._next_row, self._next_row + samples)
            self._next_row += samples

    @property
    def blocks_used(self) -> int:
        """Return the number of blocks in use."""
        return len(self._before) - len(self._free)

    def _gather(self, block: Int64, counts: Int64) -> Int32:
        """Return the concatenated tokens of rows, given each row's last block and number of tokens."""
        blocks = -(-counts // BLOCK_TOKENS)
        ends = np.cumsum(blocks)
        chain = np.empty(blocks.sum(), np.int64)  # the blocks of all rows, each row's in order
        filled = np.full(len(chain), BLOCK_TOKENS)
        here = blocks.nonzero()[0]
        filled[ends[here] - 1] -= blocks[here] * BLOCK_TOKENS - counts[here]
        back = 1  # blocks from a row's end
        while len(here):
            chain[ends[here] - back] = block[here]
            block[here] = self._before[block[here]]
            here = here[blocks[here] > back]
            back += 1
        tokens: Int32 = self._tokens[chain][np.arange(BLOCK_TOKENS) < filled[:, None]]
        return tokens

    def _give_back(self, row: int) -> list[int]:
        """Free the row's blocks; return them from first to last."""
        blocks = []
        block = int(self._block[row])
        while block >= 0:
            blocks.append(block)
            block = int(self._before[block])
        self._count[row], self._block[row] = 0, -1
        self._free += blocks
        return blocks[::-1]

    def _give_back_all(self, rows: slice | list[int]) -> None:
        """Free the blocks of many rows, without a Python loop over rows."""
        block = self._block[rows]
        while len(block := block[block >= 0]):
            self._free += block.tolist()
            block = self._before[block]
        self._count[rows], self._block[rows] = 0, -1

    def _add_blocks(self, row: Int64) -> None:
        """Append a block to each of the rows."""
        missing = len(row) - len(self._free)
        if missing > 0:
            self._make_blocks(missing)
        if len(row):
            blocks = np.array(self._free[-len(row) :], np.int64)
            del self._free[-len(row) :]
            self._before[blocks] = self._block[row]
            self._block[row] = blocks

    def _make_blocks(self, missing: int) -> None:
        old = len(self._before)
        more = max(missing, old)
        self._tokens = np.concatenate([self._tokens, np.empty((more, BLOCK_TOKENS), np.int32)])
        self._before = np.concatenate([self._before, np.empty(more, np.int64)])
        self._free += range(old, old + more)

    def _make_rows(self, samples: int) -> None:
        """Allocate twice the rows needed for open requests and `samples` more; drop the rows of closed requests."""
        old = np.fromiter(chain.from_iterable(self._rows.values()), np.int64)
        size = max(MIN_ROWS, 2 * (len(old) + samples))
        count, block = np.zeros(size, np.int64), np.full(size, -1, np.int64)
        count[: len(old)], block[: len(old)] = self._count[old], self._block[old]
        self._count, self._block, self._next_row = count, block, 0
        for rid, rows in self._rows.items():
            self._rows[rid] = range(self._next_row, self._next_row + len(rows))
            self._next_row += len(rows)


class FinishedTexts(NamedTuple):
    """Tokens and texts of the samples of a request that end with one report, in the report's order.

    A sample that cannot be detokenised has the exception in place of its text.
    """

    token_ids: list[list[int]]
    texts: list[str | Exception]


def detokenise_finished(
    ends: Sequence[Finished],
    token_store: TokenStore,
    tokenizer: Tokenizer | None,
    whole_text: Mapping[int, SamplingParams],
) -> dict[int, FinishedTexts]:
    """Detokenise the ended samples that are in the token store; return them by rid. Their tokens stay in the store.

    whole_text  as in `OpenRequests`
    """
    known, tokens, counts = token_store.read([end.rid for end in ends], [end.sample for end in ends])
    ends = [ends[place] for place in known]
    bounds = [0, *np.cumsum(counts).tolist()]
    values = tokens.tolist()
    ids = [values[first:last] for first, last in pairwise(bounds)]
    texts: list[str | Exception] = [""] * len(ids)
    if tokenizer is not None:
        try:
            texts = _texts(ends, ids, tokens, bounds, tokenizer)
        except Exception:  # a sample is at fault: detokenise each by itself
            texts = [_text_or_error(end, token_ids, tokenizer) for end, token_ids in zip(ends, ids, strict=True)]
        for index, end in enumerate(ends if whole_text else ()):
            if end.rid in whole_text:
                texts[index] = _whole_text_or_error(end, ids[index], tokenizer, whole_text[end.rid])
    by_rid: dict[int, FinishedTexts] = {}
    for end, token_ids, text in zip(ends, ids, texts, strict=True):
        finished = by_rid.get(end.rid)
        if finished is None:
            finished = by_rid[end.rid] = FinishedTexts([], [])
        finished.token_ids.append(token_ids)
        finished.texts.append(text)
    return by_rid


def _texts(
    ends: Sequence[Finished], ids: list[list[int]], tokens: Int32, bounds: list[int], tokenizer: Tokenizer
) -> list[str | Exception]:
    pieces = tokenizer.shown(tokens)
    return [
        # By default an end token is not shown, whether or not the tokenizer marks it as special.
        b"".join(pieces[first : last - (end.reason == "stop")]).decode(errors="replace")
        if end.cut is None
        else tokenizer.continuation(np.array(token_ids, np.int32), end.cut)
        for end, token_ids, (first, last) in zip(ends, ids, pairwise(bounds), strict=True)
    ]


def hides_last_token(end: Finished, params: SamplingParams) -> bool:
    """Return whether the sample's last token is an end id or a stop id that its text leaves out."""
    return end.reason == "stop" and end.cut is None and not params.include_stop_str_in_output


def _whole_text_or_error(
    end: Finished, ids: list[int], tokenizer: Tokenizer, params: SamplingParams
) -> str | Exception:
    kept = ids[: len(ids) - hides_last_token(end, params)]
    try:
        return tokenizer.continuation(np.array(kept, np.int32), end.cut, params.skip_special_tokens)
    except Exception as error:
        return error


def _text_or_error(end: Finished, ids: list[int], tokenizer: Tokenizer) -> str | Exception:
    tokens = np.array(ids, np.int32)
    try:
        (text,) = _texts([end], [ids], tokens, [0, len(ids)], tokenizer)
        return text
    except Exception as error:
        return error

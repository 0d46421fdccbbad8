"""Track how often the tokens of the draft model are accepted, and which positions it has read; write what it drafts.

Legend: n sequences, k tokens of the longest draft.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from tok_core.config import MAX_DRAFT_TOKENS
from tok_core.manager.kv_cache import Paging
from tok_core.manager.speculation.acceptance import Acceptance
from tok_core.messages import EngineInfo, Float64, Int64, ModelDrafts

OPTIMISTIC_SHARE: Final = 0.8  # acceptance assumed before the first drafts, so that the model is tried
MAX_FIRST_ROWS: Final = 256  # rows of a head's first pass that also read what was added, as the largest CUDA graph has
FORGET_TURNS: Final = 256  # times in a row that the model drafts nothing, after which its acceptance is unknown again


class DraftModel:
    """Draft model as the manager sees it: its acceptance, and the positions that it has read.

    The draft model has keys and values of its own in the pages of the target model, so that allocation, shared
    prefixes, forks and preemption hold for both. It reads nothing before it drafts: a sequence's first draft reads the
    sequence so far, and later ones read what the target model has added since. For each page, the number of its first
    positions that the draft model has read is kept until the page is released. So the samples of a prompt, and requests
    with a common prefix, read it once. A page that was copied counts as not read.

    A head (`EngineInfo.draft_head`) reads the hidden state of a position together with the token of the next one, so
    that it can read one position less of a sequence. It drafts from its own hidden states, and reads accepted tokens
    again with those of the target model. The last position of a page is read with the next token of the sequence that
    reads it first. Sequences that share the page, but not this token, draft with keys and values that are not quite
    theirs: fewer tokens may be accepted.

    `acceptance` has the number of a token within its draft, from 1 on, in place of a prediction's score.

    drafted_tokens, accepted_tokens  tokens that the model drafted, and those of them that were accepted
    """

    def __init__(self, paging: Paging, info: EngineInfo) -> None:
        self.acceptance = Acceptance(OPTIMISTIC_SHARE)
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self._table = paging.table
        self._page_size = paging.page_size
        self._releases = paging.allocator.times_released
        self._max_len = info.draft_len
        self._max_chunk_tokens = info.max_step_tokens
        self._filled = np.zeros(paging.num_pages, np.int32)  # positions read, from the page's first on
        self._filled_in = np.full(paging.num_pages, -1, np.int64)  # the use of the page that `_filled` holds for
        self._read = np.zeros(paging.table.slots, np.int64)  # positions read of the slot's sequence, or fewer
        self._read_by = np.full(paging.table.slots, -1, np.int64)  # the epoch that `_read` holds for
        self._idle_turns = 0
        self._read_again = 0  # tokens of the last `read` by which sequences had grown since they drafted
        self._ahead = int(info.draft_head)  # from a position to that of the token that is fed there
        self._max_behind = 1  # positions before the drafting one that the first pass may read

    def probabilities(self, slots: Int64, count: int) -> Float64:
        """Return the probabilities that the tokens of a draft of each slot are accepted, with all before, `[n, count]`.

        They are 0 beyond the positions that the draft model reads, and for guided sequences, whose grammar has no masks
        for tokens that the manager does not know.
        """
        self._idle_turns += 1
        if self._idle_turns > FORGET_TURNS:
            self.acceptance, self._idle_turns = Acceptance(OPTIMISTIC_SHARE), 0
        number, table = np.arange(1, count + 1, dtype=np.int32), self._table
        share = self.acceptance.share(table.family[slots][:, None], number[None])
        share[table.length[slots][:, None] + number > self._max_len] = 0
        share[table.guided[slots]] = 0
        return np.cumprod(share, axis=1, out=share)

    def read(self, slots: Int64) -> Int64:
        """Return chunks to read before the slots can draft, as slots, starts and counts `[3, c]`.

        They have at most one step's tokens. Few positions before a sequence's last token need no chunk: one, or of a
        head as many as tokens were accepted. What one chunk reads is read for all: of sequences with a common prefix,
        the first one reads it.
        """
        table, left, chunks = self._table, self._max_chunk_tokens, [np.empty((3, 0), np.int64)]
        self._read_again = 0
        if self._ahead:
            self._max_behind = max(1, min(MAX_DRAFT_TOKENS, MAX_FIRST_ROWS // max(len(slots), 1) - 1))
        new = slots[self._read_by[slots] != table.epoch[slots]]
        self._read[new], self._read_by[new] = 0, table.epoch[new]
        behind = slots[self._unread(slots) > self._max_behind]
        grown = self._read[behind] > 0
        while len(behind):
            self._read[behind] = self._first_unread(behind)
            short = self._unread(behind) > self._max_behind
            behind, grown = behind[short], grown[short]
            if not len(behind) or not left:
                break
            # Sequences whose first unread position is in one page share it: the first of them reads for now.
            page = table.pages[behind, self._read[behind] // self._page_size]
            reading = np.sort(np.unique(page, return_index=True)[1])
            slot = behind[reading]
            start, count = self._read[slot], self._unread(slot)
            count = np.clip(left - (np.cumsum(count) - count), 0, count)
            chunks.append(np.stack((slot, start, count))[:, count > 0])
            left -= int(count.sum())
            self._read_again += int(count[grown[reading]].sum())
            self._mark(slot, start, start + count)
            self._read[slot] = start + count
            others = np.delete(np.arange(len(behind)), reading)
            behind, grown = behind[others], grown[others]
        return np.concatenate(chunks, axis=1)

    def share_read_again(self, drafts: ModelDrafts) -> float:
        """Return the share of the tokens just read by which sequences had grown since they drafted."""
        return self._read_again / max(len(drafts.chunk_token), 1)

    def is_ready(self, slots: Int64) -> np.ndarray:
        """Return which slots can draft: the first pass can read all of their positions, bool `[n]`."""
        ready: np.ndarray = self._unread(slots) <= self._max_behind
        return ready

    def write(self, chunks: Int64, slots: Int64, lent: Int64) -> ModelDrafts:
        """Return the message by which `slots`, which are ready, draft the tokens of the slots `lent`, `[n, k]`."""
        table, lent = self._table, lent[:, : (lent >= 0).sum(axis=1).max(initial=0)]
        last = table.length[slots].astype(np.int64) - self._ahead
        count = last - self._read[slots]
        before = _consecutive(self._read[slots], count)
        slot, position = np.concatenate((slots, np.repeat(slots, count))), np.concatenate((last, before))
        end = np.concatenate((last + (lent >= 0).sum(axis=1), before + 1))
        self._mark(slots, self._read[slots], last + 1)
        self._read[slots] = last + 1
        self._idle_turns = 0
        self.drafted_tokens += int(np.count_nonzero(lent >= 0))
        chunk_slot, start, size = chunks.astype(np.int32)
        return ModelDrafts(
            chunk_slot=chunk_slot,
            chunk_start=start,
            chunk_count=size,
            chunk_token=table.tokens[np.repeat(chunk_slot, size), _consecutive(start + self._ahead, size)],
            slot=slot.astype(np.int32),
            position=position.astype(np.int32),
            token=table.tokens[slot, position + self._ahead],
            end=end.astype(np.int32),
            lent=lent.astype(np.int32),
        )

    def verified(self, slots: Int64, live: np.ndarray, drafted: Int64, accepted: Int64) -> None:
        """Learn how many of the drafted tokens of each slot were accepted, and that the model has read these.

        live  which slots still have the sequence that drafted
        """
        slots, drafted, accepted = slots[live], drafted[live], accepted[live]
        if not len(slots):
            return
        number = np.arange(drafted.max())
        row, column = ((number <= accepted[:, None]) & (number < drafted[:, None])).nonzero()
        family, right = self._table.family[slots][row], column < accepted[row]
        self.acceptance.observe(family, column.astype(np.int32) + 1, right)
        if self._ahead:  # it has read them with hidden states of its own
            return
        # The last drafted token was sampled by the draft model, but not read.
        first = self._read[slots]
        end = first + np.minimum(accepted, drafted - 1)
        self._mark(slots, first, end)
        self._read[slots] = end

    def _unread(self, slots: Int64) -> Int64:
        """Return how many positions before the one that drafts are not read, as far as `_read` says."""
        unread: Int64 = self._table.length[slots] - self._ahead - self._read[slots]
        return unread

    def _first_unread(self, slots: Int64) -> Int64:
        """Return how many of the first positions of each slot are read in its pages."""
        size, length = self._page_size, self._table.length[slots].astype(np.int64) - self._ahead
        first, pages = self._read[slots, None] // size, -(-length[:, None] // size)
        index = np.arange(first.min(), pages.max())
        page = self._table.pages[slots[:, None], index]
        filled = np.where(self._filled_in[page] == self._releases[page], self._filled[page], 0)
        filled[index < first] = size
        filled = np.pad(np.where(index < pages, filled, 0), ((0, 0), (0, 1)))
        short = (filled < size).argmax(axis=1)
        read: Int64 = np.minimum((index[0] + short) * size + filled[np.arange(len(slots)), short], length)
        return read

    def _mark(self, slots: Int64, start: Int64, end: Int64) -> None:
        """Take note that the positions `[start, end)` of each slot are read, as all before them are."""
        size = self._page_size
        first = start // size
        count = np.where(end > start, (end - 1) // size - first + 1, 0)
        row, index = np.repeat(np.arange(len(slots)), count), _consecutive(first, count)
        page = self._table.pages[slots[row], index]
        before = np.where(self._filled_in[page] == self._releases[page], self._filled[page], 0)
        self._filled[page] = np.maximum(before, np.minimum(end[row] - index * size, size))
        self._filled_in[page] = self._releases[page]


def _consecutive(start: Int64, count: Int64) -> Int64:
    """Return `count` numbers from each `start` on, one after the other.

    >>> _consecutive(np.array([3, 10]), np.array([2, 3])).tolist()
    [3, 4, 10, 11, 12]
    """
    numbers: Int64 = np.repeat(start - (np.cumsum(count) - count), count) + np.arange(count.sum())
    return numbers

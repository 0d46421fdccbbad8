"""A worker without a model: its next token is a hash of the context that it reads through the page table.

Any wrong page, stale page-table entry, lost copy or wrong position changes the hash, so that a sequence has the right
tokens exactly if the manager handed out its pages correctly. Steps run as on a device: pages are copied before anything
is written, all keys of a step are written before any is read, and a sequence that sampled an EOS id computes nothing
more. Sampled tokens take effect when a later step says so, as at the first stage of a pipeline; until then their
sequences cannot decode.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from tok_core.messages import (
    EngineInfo,
    ModelDrafts,
    Progress,
    PromptValues,
    RequestedPromptOutputs,
    StepInput,
    StepOutput,
    ToManager,
    VerifyRows,
)


def next_token(context: np.ndarray, sample: int, vocab: int) -> int:
    """Return the token that follows `context` in sample `sample`."""
    return zlib.crc32(context.astype(np.int32).tobytes(), sample) % vocab


def score(context: np.ndarray, token: int) -> float:
    """Return the log-probability of `token` after `context`."""
    return -float(zlib.crc32(context.astype(np.int32).tobytes(), token) % 1000)


def hidden(context: np.ndarray) -> np.ndarray:
    """Return the hidden state after `context`: two whole numbers, whose sums are exact."""
    found = zlib.crc32(context.astype(np.int32).tobytes())
    return np.array([found % 97, found // 97 % 89], np.float32)


NOTHING = -5
"""The token returned for ended sequences."""


class SimulatedWorker:
    """Per-slot and per-page state as a worker has it, in NumPy.

    The draft model drafts the token that will be sampled with probability `draft_accuracy`. It checks that all tokens
    before are in its own cache.
    """

    def __init__(self, info: EngineInfo) -> None:
        self.info = info
        self.page_size = info.page_size
        per_slot = -(-info.max_model_len // info.page_size)
        self.cache = np.full(info.num_pages * info.page_size, -1, np.int32)
        self.draft_cache = self.cache.copy()
        self.draft_accuracy = 1.0
        self.unpredictable = 0.1  # probability that a token of verify rows cannot be predicted
        self.draft_reads = 0  # tokens read by the draft model, those of drafts not counted
        self._chance = np.random.default_rng(0)
        self.page_table = np.full((info.max_running, per_slot), -1, np.int32)
        self.length = np.zeros(info.max_running, np.int64)
        self.last_token = np.zeros(info.max_running, np.int32)
        self.sample = np.zeros(info.max_running, np.int64)
        self.eos_from_position = np.zeros(info.max_running, np.int64)
        self.ended = np.zeros(info.max_running, np.bool_)
        self.renewed = np.zeros(info.max_running, np.int64)  # the step that gave each slot to its current sequence
        self.drawn: deque[tuple[int, int, int]] = deque()  # step, slot and token of samples that have not taken effect

    def run(self, step: StepInput) -> StepOutput:
        """Run one step."""
        self._take_over(step.sampled_upto)
        self._apply(step)
        draft_token = np.empty((0, 0), np.int32) if step.drafts is None else self._draft(step.drafts)
        drafted = None if step.verify_rows is None else self._set_verify_rows(step.verify_rows)
        owed = {slot for number, slot, _ in self.drawn if self.renewed[slot] <= number}
        assert not owed.intersection(step.decode_slot.tolist()), "a row decodes before its last token is there"
        slots = [*step.decode_slot.tolist(), *step.prefill_slot.tolist()]
        assert len(set(slots)) == len(slots)
        self._write(step)
        contexts = [self._context(step, row, slot) for row, slot in enumerate(slots)]
        sampled = list(zip(step.sample_row.tolist(), step.sample_slot.tolist(), strict=True))
        token = [self._draw(contexts[row], slot) for row, slot in sampled]
        self.drawn.extend((step.step, slot, one) for (_, slot), one in zip(sampled, token, strict=True))
        accepted = np.empty(0, np.int32)
        if step.verify_rows is not None and drafted is not None:
            self._take_over(step.step)
            accepted = self._accept(step.verify_rows, drafted)
        count = len(token)
        return StepOutput(
            step=step.step,
            token=np.array(token, np.int32),
            logprob=np.zeros(count, np.float32),
            top_token=np.empty((count, 0), np.int32),
            top_logprob=np.empty((count, 0), np.float32),
            launch_seconds=0.25,
            device_seconds=0.5,
            prompts=None if step.prompts is None else self._prompts(step, step.prompts, contexts),
            draft_token=draft_token,
            accepted=accepted,
            predictable=(self._chance.random(len(step.decode_slot)) < self.draft_accuracy).astype(np.int32),
            draft_seconds=0.125 if len(draft_token) else 0.0,
        )

    def _set_verify_rows(self, rows: VerifyRows) -> dict[tuple[int, int], int]:
        """Let the lent slots feed drafted tokens, some of which are wrong or missing; return them by row and column."""
        drafted = dict[tuple[int, int], int]()
        for row, (parent, lent) in enumerate(zip(rows.parent.tolist(), rows.lent, strict=True)):
            length, ended = int(self.length[parent]), bool(self.ended[parent])
            places = [] if ended else [self._place(parent, position) for position in range(length)]
            context, missing = [*self.cache[places].tolist(), int(self.last_token[parent])], ended
            for i, slot in enumerate(lent[lent >= 0].tolist()):
                for column in (self.page_table, self.sample, self.eos_from_position, self.renewed):
                    column[slot] = column[parent]
                missing |= self._chance.random() < self.unpredictable
                token = next_token(np.array(context), int(self.sample[parent]), self.info.vocab_size)
                token = (token + (self._chance.random() >= self.draft_accuracy)) % self.info.vocab_size
                drafted[row, i] = NOTHING if missing else token
                context.append(token)
                self.length[slot], self.last_token[slot], self.ended[slot] = length + 1 + i, token, missing
        return drafted

    def _accept(self, rows: VerifyRows, drafted: Mapping[tuple[int, int], int]) -> np.ndarray:
        """Advance the sequences past accepted drafts; return how many of each are accepted."""
        accepted = np.zeros(len(rows.parent), np.int32)
        for row, (parent, lent) in enumerate(zip(rows.parent.tolist(), rows.lent, strict=True)):
            newest = parent
            for i, slot in enumerate(lent[lent >= 0].tolist()):
                if self.ended[newest] or drafted[row, i] != self.last_token[newest]:
                    break
                newest, accepted[row] = slot, i + 1
            self.length[parent] += accepted[row]
            self.last_token[parent], self.ended[parent] = self.last_token[newest], self.ended[newest]
        return accepted

    def _draft(self, drafts: ModelDrafts) -> np.ndarray:
        tokens = iter(drafts.chunk_token.tolist())
        for slot, start, count in zip(drafts.chunk_slot, drafts.chunk_start, drafts.chunk_count, strict=True):
            for position in range(start, start + count):
                self.draft_cache[self._place(slot, position)] = next(tokens)
        assert next(tokens, None) is None
        self.draft_reads += len(drafts.chunk_token) + len(drafts.slot)
        for slot, position, token in zip(drafts.slot, drafts.position, drafts.token, strict=True):
            self.draft_cache[self._place(slot, position)] = token
        found = np.full(drafts.lent.shape, NOTHING, np.int32)
        assert (drafts.end[len(found) :] == drafts.position[len(found) :] + 1).all()
        for row, lent in enumerate(drafts.lent):
            slot, length = int(drafts.slot[row]), int(drafts.position[row])
            assert self.length[slot] == length
            assert (lent >= 0).sum() == drafts.end[row] - length
            places = [self._place(slot, position) for position in range(length)]
            assert (self.draft_cache[places] == self.cache[places]).all(), "the draft model has not read a token"
            context = [*self.cache[places].tolist(), int(drafts.token[row])]
            for i, other in enumerate(lent[lent >= 0].tolist()):
                token = next_token(np.array(context), int(self.sample[slot]), self.info.vocab_size)
                wrong = self._chance.random() >= self.draft_accuracy
                found[row, i] = self.last_token[other] = (token + wrong) % self.info.vocab_size
                if i:
                    self.draft_cache[self._place(slot, length + i)] = context[-1]
                context.append(int(found[row, i]))
        return found

    def _prompts(
        self, step: StepInput, prompt_outputs: RequestedPromptOutputs, contexts: list[np.ndarray]
    ) -> PromptValues:
        token, logprob, pooled = iter(prompt_outputs.scored_token.tolist()), [], []
        contexts = contexts[len(step.decode_slot) :]
        for chunk, count in zip(prompt_outputs.scored, prompt_outputs.scored_count, strict=True):
            first = int(step.prefill_start[chunk]) + 1
            logprob += [score(contexts[chunk][:end], next(token)) for end in range(first, first + count)]
        assert next(token, None) is None
        for chunk, count in zip(prompt_outputs.pooled, prompt_outputs.pooled_count, strict=True):
            end = int(step.prefill_start[chunk] + step.prefill_count[chunk])
            pooled.append(sum(hidden(contexts[chunk][: at + 1]) for at in range(end - count, end)))
        top = np.zeros((len(logprob), prompt_outputs.top_logprobs), np.int32)
        vectors = np.array(pooled, np.float32).reshape(-1, 2)
        rank = np.ones(len(logprob), np.int32)
        return PromptValues(np.array(logprob, np.float32), rank, top, top.astype(np.float32), vectors)

    def _take_over(self, sampled_upto: int) -> None:
        while self.drawn and self.drawn[0][0] <= sampled_upto:
            number, slot, token = self.drawn.popleft()
            if self.renewed[slot] <= number and token != NOTHING:
                self.last_token[slot] = token
                ends = token in self.info.eos_token_ids and self.length[slot] >= self.eos_from_position[slot]
                self.ended[slot] |= ends

    def _apply(self, step: StepInput) -> None:
        if step.new is not None:
            self.renewed[step.new.slot] = step.step
            for name in ("length", "last_token", "sample", "eos_from_position"):
                getattr(self, name)[step.new.slot] = getattr(step.new, name)
            self.ended[step.new.slot] = False
        for one in step.shared:
            self.page_table[one.slot, : len(one.page)] = one.page
        self.page_table[step.page_slot, step.page_index] = step.page_id
        assert (self.page_table[step.page_slot, step.page_index] == step.page_id).all(), "one entry, two pages"
        if (moves := step.moves) is not None:
            self.renewed[moves.slot] = step.step
            for column in (self.page_table, self.sample, self.eos_from_position):
                column[moves.slot] = column[moves.source]
            assert not self.ended[moves.source].any()
            self.ended[moves.slot] = False
            self.length[moves.slot], self.last_token[moves.slot] = moves.length, moves.last_token
        assert len(set(step.copy_dst.tolist())) == len(step.copy_dst), "a page is copied to twice"
        pages = self.cache.reshape(-1, self.page_size)
        pages[step.copy_dst] = pages[step.copy_src]

    def _draw(self, context: np.ndarray, slot: int) -> int:
        if self.ended[slot]:
            return NOTHING
        return next_token(context, int(self.sample[slot]), self.info.vocab_size)

    def _write(self, step: StepInput) -> None:
        written: list[int] = []
        for slot in step.decode_slot[~self.ended[step.decode_slot]]:
            written.append(self._store(slot, int(self.length[slot]), int(self.last_token[slot])))
            self.length[slot] += 1
        tokens = iter(step.prefill_token.tolist())
        for slot, start, count in zip(step.prefill_slot, step.prefill_start, step.prefill_count, strict=True):
            assert count > 0
            written += [self._store(slot, position, next(tokens)) for position in range(start, start + count)]
            self.length[slot] = start + count
        assert len(set(written)) == len(written), "two sequences write to one place"

    def _store(self, slot: int, position: int, token: int) -> int:
        row = self._place(slot, position)
        self.cache[row] = token
        return row

    def _place(self, slot: int, position: int) -> int:
        row = int(self.page_table[slot, position // self.page_size]) * self.page_size + position % self.page_size
        assert row >= 0
        return row

    def _context(self, step: StepInput, row: int, slot: int) -> np.ndarray:
        length = int(self.length[slot])
        assert length <= step.max_kv
        position = np.arange(length)
        reader = np.full(length, slot)
        shared = 0  # keys covered by levels so far; levels are contiguous
        for level in step.levels:
            (group,) = np.flatnonzero((level.start <= row) & (row < level.start + level.count)).tolist() or [None]
            if group is not None:
                assert row < len(step.decode_slot)
                assert level.kv_start[group] == shared
                shared = int(level.kv_end[group])
                assert shared < length or self.ended[slot]
                reader[level.kv_start[group] : shared] = level.slot[group]
        page = self.page_table[reader, position // self.page_size]
        context: np.ndarray = self.cache[page * self.page_size + position % self.page_size]
        return context


class SimulatedPorts:
    """Ports of a manager over a simulated worker; tokens return `delay` steps late, or when the manager is idle."""

    def __init__(self, info: EngineInfo, delay: int) -> None:
        self.worker = SimulatedWorker(info)
        self.delay = delay
        self.inbox: list[ToManager] = []
        self.queued: deque[StepOutput] = deque()
        self.reports: list[Progress] = []
        self.steps: list[StepInput] = []
        self.idle = False
        self.most_queued = 0

    def requests(self) -> list[ToManager]:
        inbox, self.inbox = self.inbox, []
        return inbox

    def outputs(self) -> list[StepOutput]:
        if self.queued and (self.idle or len(self.queued) > self.delay):
            self.idle = False
            return [self.queued.popleft()]
        return []

    def send(self, step: StepInput) -> None:
        self.steps.append(step)
        self.queued.append(self.worker.run(step))
        self.most_queued = max(self.most_queued, len(self.queued))

    def report(self, progress: Progress) -> None:
        self.reports.append(progress)

    def wait(self, seconds: float) -> None:
        self.idle = True


def collect(reports: list[Progress]) -> tuple[dict[tuple[int, int], list[int]], dict[tuple[int, int], Any]]:
    """Return tokens and endings by request and sample."""
    tokens: dict[tuple[int, int], list[int]] = {}
    ends: dict[tuple[int, int], Any] = {}
    for report in reports:
        for rid, sample, token in zip(report.rid.tolist(), report.sample.tolist(), report.token.tolist(), strict=True):
            assert (rid, sample) not in ends, "a token after the end"
            tokens.setdefault((rid, sample), []).append(token)
        for end in report.finished:
            assert (end.rid, end.sample) not in ends
            ends[end.rid, end.sample] = end
    return tokens, ends

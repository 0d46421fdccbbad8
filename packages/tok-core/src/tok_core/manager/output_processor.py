"""Turn the tokens that come back from the worker into sample progress, stops and reports."""

from __future__ import annotations

import logging
from collections import Counter, deque
from typing import NamedTuple

import numpy as np

from tok_core.manager.admission import LengthModel
from tok_core.manager.ends import EndFinder
from tok_core.manager.faults import Faults
from tok_core.manager.grammar_manager import GrammarManager
from tok_core.manager.prompt_outputs import PromptOutputProcessor
from tok_core.manager.scheduling import Reclaimer
from tok_core.manager.sequences import NEVER, NOBODY, SequenceTable, State
from tok_core.manager.speculation import Drafts, Speculation
from tok_core.manager.stops import StopSets
from tok_core.messages import EMPTY, Embedded, Finished, Int32, Int64, Scores, StepInput, StepOutput


class Reported(NamedTuple):
    """Tokens that belong to open samples, in columns, and the samples that they end; as in `Progress`."""

    rid: np.ndarray
    sample: np.ndarray
    token: np.ndarray
    logprob: np.ndarray
    top_token: np.ndarray
    top_logprob: np.ndarray
    finished: list[Finished]
    scores: list[Scores]
    embedded: list[Embedded]
    rounds: list[int]


class OutputProcessor:
    """Processor of StepOutputs, in the order of their StepInputs. Tokens of slots freed meanwhile are dropped.

    in_flight  for each step at the worker: its number, the slots that sample in it, and their epochs
    """

    def __init__(
        self,
        table: SequenceTable,
        reclaimer: Reclaimer,
        stops: StopSets,
        lengths: LengthModel,
        grammars: GrammarManager,
        faults: Faults,
        dtype: str,
        speculator: Speculation | None = None,
    ) -> None:
        self.speculator = speculator
        self.table = table
        self.reclaimer = reclaimer
        self.stops = stops
        self.lengths = lengths
        self.grammars = grammars
        self.faults = faults
        self.prompts = PromptOutputProcessor(table, faults)
        self._ends = EndFinder(table, stops, faults)
        self.in_flight: deque[tuple[int, np.ndarray, np.ndarray]] = deque()
        self.output_tokens = self.skipped_tokens = self.discarded_tokens = self.requests_finished = 0
        self._verified: tuple[Drafts, np.ndarray, StepOutput] | None = None  # with the slots of the output's rows
        self._lent = np.zeros(table.slots, np.bool_)  # scratch; faster than `np.isin`
        self._dtype = dtype
        self._broken_before = False  # whether logits that are not finite have been logged

    def expect(self, step: StepInput) -> None:
        """Record whose tokens a step that was sent will return."""
        slots = step.sample_slot.astype(np.int64)  # NumPy indexes by int64 in half the time
        self.in_flight.append((step.step, slots, self.table.epoch[slots]))
        if step.prompts is not None:
            self.prompts.expect(step, step.prompts)

    def take(self, output: StepOutput) -> Reported:
        """Store the step's tokens, end the sequences that they end, and return the report.

        Requests with logits that are not finite fail; the report leaves them out. Rows of drafts are left to
        `accept_drafts`.
        """
        number, slots, epoch = self.in_flight.popleft()
        assert number == output.step, f"step {output.step} returned where {number} was expected"
        scores, embedded = ([], []) if output.prompts is None else self.prompts.take(output.prompts)
        live = self.table.epoch[slots] == epoch
        drafted = 0
        if self.speculator is not None and (drafts := self.speculator.returned(output)) is not None:
            self._verified = drafts, slots, output
            drafted = len(drafts.lent)
            self._lent[drafts.lent] = True
            live &= ~self._lent[slots]
            self._lent[drafts.lent] = False
        if broken := self._find_broken(output.logprob, slots, live, scores, embedded):
            self._fail_broken(broken)
            live &= ~np.isin(self.table.rid[slots], list(broken))
            scores = [one for one in scores if one.rid not in broken]
            embedded = [one for one in embedded if one.rid not in broken]
        done = self._end_without_output(slots, live)
        rows = live.nonzero()[0]  # NumPy masks columns of width 0, top tokens that nobody asked for, slowly
        slots = slots[rows]
        self.discarded_tokens += len(live) - drafted - len(slots) - len(done)
        guided = self.table.guided[slots]
        reported, _ = self._append_rows(slots, 0, output, rows)
        self._requeue(slots[~guided])
        return reported._replace(finished=done + reported.finished, scores=scores, embedded=embedded)

    def accept_drafts(self) -> list[Reported]:
        """Append the tokens sampled after accepted drafts, and return their report, if there are any.

        Call this after each `take`. A row of a draft counts if the token that it fed is the one sampled before it. A
        row whose logits are not finite does not: the next step computes it again. If the worker has accepted it, the
        request fails.
        """
        if self._verified is None:
            return []
        (drafts, slots, output), self._verified = self._verified, None
        assert self.speculator is not None
        table, parents = self.table, drafts.parent
        row_of = np.zeros(table.slots, np.int64)
        row_of[slots] = np.arange(len(slots))
        rows = row_of[np.column_stack((parents, drafts.slot))]
        known, finite = np.hsplit(np.isfinite(output.logprob[rows]), [1])
        right = self.speculator.verify(drafts, rows, output) & known  # otherwise `take` has left the token out
        if on_device := self.speculator.accepts_on_device:
            right &= self._fail_broken_drafts(drafts, (right & ~finite).any(axis=1))[:, None]
        live = (table.state[parents] == State.DECODE) | (on_device & (table.state[parents] == State.PREEMPTED))
        live &= table.epoch[parents] == drafts.epoch
        accepted = np.logical_and.accumulate(right & finite & live[:, None], axis=1)
        number, left = accepted.T.nonzero()
        if not len(left):
            return []
        table.length[parents] += accepted.sum(axis=1, dtype=np.int32)
        table.moved[parents[left]] = not on_device
        reported, appended = self._append_rows(parents[left], number, output, rows[left, number + 1])
        self.speculator.count_accepted(drafts, left[appended])
        return [reported]

    def _fail_broken_drafts(self, drafts: Drafts, broken: np.ndarray) -> np.ndarray:
        """Fail the requests of `broken` drafts, with accepted rows whose logits are not finite; return the others."""
        broken &= self.table.epoch[drafts.parent] == drafts.epoch
        if broken.any():
            self._fail_broken(set(self.table.rid[drafts.parent[broken]].tolist()))
        unbroken: np.ndarray = ~broken
        return unbroken

    def _append_rows(
        self, slots: Int64, ahead: Int64 | int, output: StepOutput, rows: Int64
    ) -> tuple[Reported, np.ndarray]:
        """Append the tokens of these rows of the output (`_append_tokens`), and advance grammars that go on."""
        guided, epoch, token = self.table.guided[slots], self.table.epoch[slots], output.token[rows]
        columns = output.logprob[rows], output.top_token[rows], output.top_logprob[rows]
        reported, appended = self._append_tokens(slots, ahead, token, *columns)
        followed = guided & (self.table.epoch[slots] == epoch)
        if followed.any():
            self.grammars.follow(slots[followed], token[followed])
        return reported, appended

    def jump_forward(self) -> list[Reported]:
        """Append the forced tokens of guided sequences that are known by now, and return their reports.

        Call this after each `take`, and whenever grammar workers may have replied: sequences that were held can then
        sample again.
        """
        advance = self.grammars.advance()
        if advance is None:
            return []
        slots, runs, stuck = advance
        top = int(self.table.top_logprobs[slots].max(initial=0))
        epoch, count = self.table.epoch[slots], np.array([len(run) for run in runs], np.int64)
        # Runs may exceed the limit: a sequence whose end check raises would be written beyond its row of the table.
        count = np.minimum(count, self.table.limit[slots] - self.table.known[slots])
        reported = []
        ahead, which = (np.arange(count.max(initial=0))[:, None] < count).nonzero()
        if len(which):
            token = np.array([runs[i][at] for i, at in zip(which, ahead, strict=True)], np.int32)
            one, appended = self._append_tokens(slots[which], ahead, token, *_forced_values(token, top))
            self.skipped_tokens += int(np.count_nonzero(appended))
            reported.append(one)
        left = self.table.epoch[slots] == epoch
        if (stuck & left).any():
            reported.append(_empty_report(top)._replace(finished=self._end_stuck(slots[stuck & left])))
        self._resume_held(slots[left & ~stuck])
        self._requeue(slots[left & ~stuck])
        return reported

    def _find_broken(
        self, logprob: np.ndarray, slots: np.ndarray, live: np.ndarray, scores: list[Scores], embedded: list[Embedded]
    ) -> set[int]:
        """Return the requests that sampled from logits that are not finite, or with prompt outputs that are not finite.

        The log-probability of a sampled token is finite unless a logit is NaN or +inf, or all are -inf.
        """
        finite = np.isfinite(logprob)
        broken = set() if finite.all() else set(self.table.rid[slots[live & ~finite]].tolist())
        broken |= {one.rid for one in scores if not np.isfinite(one.logprob).all()}
        return broken | {one.rid for one in embedded if not np.isfinite(one.vector).all()}

    def _fail_broken(self, rids: set[int]) -> None:
        """Fail the requests whose logits were not finite; log this the first time only."""
        reason = (
            "the model's logits are not finite: its weights hold NaN or infinity, or its numbers leave the range of "
            f"{self._dtype}"
        )
        if not self._broken_before:
            log.error("a request failed: %s; further failures of this kind are not logged", reason)
        self._broken_before = True
        for rid in rids:
            self.faults.fail(rid, reason)

    def _append_tokens(
        self,
        slots: Int64,
        ahead: Int64 | int,
        token: Int32,
        logprob: np.ndarray,
        top_token: np.ndarray,
        top_logprob: np.ndarray,
    ) -> tuple[Reported, np.ndarray]:
        """Append tokens to sequences and end those that they end; return the report, and which tokens it has, bool [n].

        A token after the one that ends its sequence is not appended.

        ahead  int64 [n], ascending: appended tokens of the sequence before this one; 0: one token for each sequence
        """
        table, appended = self.table, np.ones(len(slots), np.bool_)
        rounds, known = [len(slots)], table.known[slots] + np.asarray(ahead + 1, np.int32)
        table.tokens[slots, known - 1] = token
        ended = self._ends.find(slots, known, token)
        if not isinstance(ahead, int):
            if ended.finished:
                ended = ended.first()
                end = np.full(table.slots, NEVER, np.int32)
                end[ended.slots] = ended.known
                appended = known <= end[slots]
            slots, known, token = slots[appended], known[appended], token[appended]
            logprob, top_token, top_logprob = (column[appended] for column in (logprob, top_token, top_logprob))
            rounds = np.bincount(ahead[appended]).tolist()
        table.known[slots] = known  # the last entry of a slot counts, which is its largest
        self.output_tokens += len(slots)
        if self.speculator is not None:
            self.speculator.note(slots, known)
        columns = table.rid[slots], table.sample[slots], token, logprob, top_token, top_logprob
        if ended.finished:
            self._learn(ended.slots, ended.by_stop)
            self._end(ended.slots)
        return Reported(*columns, ended.finished, [], [], rounds), appended

    def _end_stuck(self, slots: Int64) -> list[Finished]:
        """End sequences whose grammar no token can continue; report them as ended by length."""
        finished = self._ends.by_length(slots, self.table.known[slots])
        self._end(slots)
        return finished

    def _end_without_output(self, slots: np.ndarray, live: np.ndarray) -> list[Finished]:
        """End the live sequences that may have no output token, and remove them from `live`.

        Their sampled token only shows that the prompt has been computed.
        """
        without_output = live & (self.table.limit[slots] <= self.table.prompt_len[slots])
        if not without_output.any():
            return []
        live &= ~without_output
        ending = slots[without_output]
        finished = self._ends.by_length(ending, self.table.known[ending])
        self._release(ending)
        return finished

    def _learn(self, slots: Int64, ended: np.ndarray) -> None:
        """Update the length model with sequences that have ended; `ended`: by a stop and not by length."""
        table = self.table
        prompt, known, limit = table.prompt_len[slots], table.known[slots], table.limit[slots]
        columns = (table.followed[slots], known - prompt, limit - prompt)
        seen, lengths, limits = (column.astype(np.int64) for column in columns)
        self.lengths.observe(seen, lengths, limits, ended)

    def _end(self, slots: Int64) -> None:
        """End sequences with the last token that they have."""
        table = self.table
        # The worker computes nothing for a sequence after its end, so its last token's KV is not in the cache.
        table.length[slots] = np.minimum(table.length[slots], table.known[slots] - 1)
        self._release(slots)

    def _release(self, slots: Int64) -> None:
        """Release the slots of ended sequences, and what a request holds once its last sample has ended."""
        for request, count in Counter(map(self.table.requests.__getitem__, slots.tolist())).items():
            assert request is not None
            request.left -= count
            if request.left == 0:
                assert request.stop_set is not None
                self.stops.release(request.stop_set)
                self.requests_finished += 1
                self.reclaimer.close(request)
        self.reclaimer.release(slots)

    def _resume_held(self, slots: Int64) -> None:
        """Let held sequences sample again; they prefill first if more than their last token is not in the cache."""
        table = self.table
        table.held[slots] = False
        behind = slots[(table.state[slots] == State.DECODE) & (table.known[slots] > table.length[slots] + 1)]
        table.target[behind] = table.known[behind]
        table.state[behind] = State.PREFILL

    def _requeue(self, slots: Int64) -> None:
        """Requeue preempted sequences whose last scheduled token is back."""
        table = self.table
        back = slots[table.state[slots] == State.PREEMPTED]
        for slot in back[table.known[back] > table.length[back]].tolist():
            self.reclaimer.requeue(slot)


log = logging.getLogger("tok_core")


def merge_reports(reports: list[Reported]) -> Reported:
    """Concatenate reports to one; prompt outputs are those of the first. No reports: an empty one."""
    if len(reports) < 2:
        return reports[0] if reports else EMPTY_REPORT
    top = max(one.top_token.shape[1] for one in reports)
    columns = list(zip(*(_widen(one, top) for one in reports), strict=True))[:6]
    rid, sample, token, logprob, top_token, top_logprob = (np.concatenate(part) for part in columns)
    finished = [end for one in reports for end in one.finished]
    rounds = [rows for one in reports for rows in one.rounds]
    first = reports[0]
    return Reported(rid, sample, token, logprob, top_token, top_logprob, finished, first.scores, first.embedded, rounds)


def _widen(one: Reported, top: int) -> Reported:
    """Return the report with `top` most likely tokens per row, padded with tokens of log-probability −inf."""
    more = ((0, 0), (0, top - one.top_token.shape[1]))
    if not more[1][1]:
        return one
    logprob = np.pad(one.top_logprob, more, constant_values=-np.inf)
    return one._replace(top_token=np.pad(one.top_token, more), top_logprob=logprob)


def _empty_report(top: int) -> Reported:
    columns = NOBODY, EMPTY, EMPTY, np.empty(0, np.float32), EMPTY.reshape(0, top), np.empty((0, top), np.float32)
    return Reported(*columns, [], [], [], [])


EMPTY_REPORT = _empty_report(0)


def _forced_values(token: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the log-probabilities of forced tokens, and their `top` most likely tokens with log-probabilities.

    A forced token has log-probability 0 and is the most likely one; the others are padding of log-probability −inf.
    """
    top_token, top_logprob = np.zeros((len(token), top), np.int32), np.full((len(token), top), -np.inf, np.float32)
    top_token[:, :1], top_logprob[:, :1] = token[:, None], 0.0
    return np.zeros(len(token), np.float32), top_token, top_logprob

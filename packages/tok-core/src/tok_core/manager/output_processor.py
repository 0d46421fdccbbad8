"""Turn the tokens that come back from the worker into sample progress, stops and reports."""

from __future__ import annotations

import logging
from collections import Counter, deque
from typing import NamedTuple

import numpy as np

from tok_core.manager.admission import LengthModel
from tok_core.manager.faults import Faults
from tok_core.manager.grammar_manager import GrammarManager
from tok_core.manager.prompt_outputs import PromptOutputProcessor
from tok_core.manager.scheduling import Reclaimer
from tok_core.manager.sequences import NEVER, SequenceTable, State
from tok_core.manager.speculation import Drafts, Speculation
from tok_core.manager.stops import END, MAYBE_STRING, STOP_ID, WITHIN, StopSets, TokenRows
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


class _Ended(NamedTuple):
    """Sequences that end, n of them.

    slots     int64 [n]
    known     int32 [n], tokens of each, with the one that ends it
    by_stop   bool [n], whether each ends by a stop and not by length
    finished  the report of each
    """

    slots: Int64
    known: Int32
    by_stop: np.ndarray
    finished: list[Finished]


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
        self.in_flight: deque[tuple[int, np.ndarray, np.ndarray]] = deque()
        self.output_tokens = self.skipped_tokens = self.discarded_tokens = self.requests_finished = 0
        self._verified: tuple[Drafts, np.ndarray, StepOutput] | None = None  # with the slots of the output's rows
        self._lent = np.zeros(table.slots, np.bool_)  # scratch; faster than `np.isin`
        self._dtype = dtype
        self._broken_before = False  # whether logits that are not finite have been logged

    def expect(self, step: StepInput) -> None:
        """Record whose tokens a step that was sent will return."""
        slots = step.sample_slot
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
        slots = slots[live].astype(np.int64)
        self.discarded_tokens += len(live) - drafted - len(slots) - len(done)
        guided = self.table.guided[slots]
        reported, _ = self._append_rows(slots, 0, output, live)
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
        rows = row_of[drafts.slot]
        sampled = output.token[np.column_stack((row_of[parents], rows[:, :-1]))]
        known = np.isfinite(output.logprob[row_of[parents]])[:, None]  # otherwise `take` has left the token out
        finite = np.isfinite(output.logprob[rows])
        right = self.speculator.verify(drafts, sampled, finite & known, output) & known
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
        reported, appended = self._append_rows(parents[left], number, output, rows[left, number])
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
        self, slots: Int64, ahead: Int64 | int, output: StepOutput, rows: np.ndarray
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
        ended = self._find_ends(slots, known, token)
        if not isinstance(ahead, int):
            if ended.finished:
                ended = _first_ends(ended)
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
        finished = self._ended_by_length(slots, self.table.known[slots])
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
        ending = slots[without_output].astype(np.int64)
        finished = self._ended_by_length(ending, self.table.known[ending])
        self._release(ending)
        return finished

    def _find_ends(self, slots: Int64, known: Int32, token: Int32) -> _Ended:
        """Find the sequences that their new tokens end, as `_find_ended`. A request for which that raises is at fault.

        The sequences of a request at fault do not end here.
        """
        try:
            return self._find_ended(slots, known, token)
        except Exception:
            found = []
            for rid in np.unique(self.table.rid[slots]).tolist():
                own = self.table.rid[slots] == rid
                try:
                    found.append(self._find_ended(slots[own], known[own], token[own]))
                except Exception as error:
                    self.faults.add(rid, error)
            return _join_ends(found)

    def _find_ended(self, slots: Int64, known: Int32, token: Int32) -> _Ended:
        """Find the sequences among `slots` that their new token ends; changes nothing.

        known  number of the sequence's tokens, with the new one
        """
        table = self.table
        flags = self._stop_flags(slots, known, token)
        at_limit = known >= table.limit[slots]
        may_end = ((flags != 0) | at_limit).nonzero()[0]
        if not flags.any():  # the common case
            ending = slots[may_end], known[may_end]
            return _Ended(*ending, np.zeros(len(may_end), np.bool_), self._ended_by_length(*ending))
        rows = zip(*(column[may_end].tolist() for column in (slots, known, token, flags, at_limit)), strict=True)
        finished = [self._finished(slot, size, new, flag, at_limit=full) for slot, size, new, flag, full in rows]
        may_end = may_end[np.array([one is not None for one in finished], np.bool_)]
        found = [one for one in finished if one is not None]
        return _Ended(
            slots[may_end], known[may_end], np.array([one.reason != "length" for one in found], np.bool_), found
        )

    def _stop_flags(self, slots: Int64, known: Int32, token: Int32) -> np.ndarray:
        """Return the flags of `StopSets.classify` for new tokens that may end their sequence; 0 if they cannot.

        Flags of tokens before `min_tokens` are 0. MAYBE_STRING is cleared where the bytes before rule out a match.
        """
        table = self.table
        flags = self.stops.classify(table.stop_set[slots], token)
        flags = np.where(known > table.unstopped_length[slots], flags, 0)
        to_check = (flags & (MAYBE_STRING | WITHIN) == MAYBE_STRING).nonzero()[0]
        if len(to_check):
            of = slots[to_check]
            rows = TokenRows(table.tokens, of, table.prompt_len[of], known[to_check] - 1)
            impossible = to_check[~self.stops.possible(table.stop_set[of], rows)]
            flags[impossible] &= END | STOP_ID
        return flags

    def _finished(self, slot: int, known: int, token: int, flags: int, *, at_limit: bool) -> Finished | None:
        """Return the report of the slot's sequence if its new token ends it; None if it does not."""
        table = self.table
        first = int(table.prompt_len[slot])
        whose = int(table.rid[slot]), int(table.sample[slot])
        # A stop string that ends with an end token still has to be cut from the text.
        if flags & MAYBE_STRING:
            hit = self.stops.find(int(table.stop_set[slot]), table.tokens[slot, first:known])
            if hit is not None:
                return Finished(*whose, "stop", known - first, hit.stop, hit.cut)
        if flags & (END | STOP_ID):
            return Finished(*whose, "stop", known - first, None if flags & END else token)
        return Finished(*whose, "length", known - first) if at_limit else None

    def _learn(self, slots: Int64, ended: np.ndarray) -> None:
        """Update the length model with sequences that have ended; `ended`: by a stop and not by length."""
        table = self.table
        prompt, known, limit = table.prompt_len[slots], table.known[slots], table.limit[slots]
        columns = (table.followed[slots], known - prompt, limit - prompt)
        seen, lengths, limits = (column.astype(np.int64) for column in columns)
        self.lengths.observe(seen, lengths, limits, ended)

    def _ended_by_length(self, slots: Int64, known: Int32) -> list[Finished]:
        """Return the reports of sequences that end by length, with `known` tokens."""
        table = self.table
        columns = table.rid[slots], table.sample[slots], known - table.prompt_len[slots]
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [Finished(rid, sample, "length", tokens) for rid, sample, tokens in rows]

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

NOBODY: Int64 = np.empty(0, np.int64)


def _join_ends(found: list[_Ended]) -> _Ended:
    slots, known, by_stop, finished = zip(*found, strict=True) if found else ((NOBODY,), (EMPTY,), (NOBODY == 0,), ())
    joined = np.concatenate(slots), np.concatenate(known), np.concatenate(by_stop)
    return _Ended(*joined, [end for ends in finished for end in ends])


def _first_ends(ended: _Ended) -> _Ended:
    """Return the first end of each sequence."""
    first = np.sort(np.unique(ended.slots, return_index=True)[1])
    finished = [ended.finished[i] for i in first.tolist()]
    return _Ended(ended.slots[first], ended.known[first], ended.by_stop[first], finished)


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

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
from tok_core.manager.sequences import SequenceTable, State
from tok_core.manager.speculation import Drafts, Speculation
from tok_core.manager.stops import END, MAYBE_STRING, STOP_ID, WITHIN, StopSets, TokenRows
from tok_core.messages import EMPTY, Embedded, Finished, Int64, Scores, StepInput, StepOutput


class Reported(NamedTuple):
    """Tokens of one step that belong to open samples, in columns, and the samples that they end; as in `Progress`."""

    rid: np.ndarray
    sample: np.ndarray
    token: np.ndarray
    logprob: np.ndarray
    top_token: np.ndarray
    top_logprob: np.ndarray
    finished: list[Finished]
    scores: list[Scores]
    embedded: list[Embedded]


class _Ended(NamedTuple):
    """Sequences that end, int64 [n]; whether each ends by a stop and not by length, bool [n]; the report of each."""

    slots: Int64
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
        reported = self._append_rows(slots, output, live)
        self._requeue(slots[~guided])
        return reported._replace(finished=done + reported.finished, scores=scores, embedded=embedded)

    def accept_drafts(self) -> list[Reported]:
        """Append the tokens sampled after accepted drafts; return one report per round of tokens.

        Call this after each `take`. A row of a draft counts if the token that it fed is the one sampled before it. A
        row whose logits are not finite does not: the next step computes it again. If the worker has accepted it, the
        request fails.
        """
        if self._verified is None:
            return []
        (drafts, slots, output), self._verified = self._verified, None
        assert self.speculator is not None
        table, reported = self.table, []
        row_of = np.zeros(table.slots, np.int64)
        row_of[slots] = np.arange(len(slots))
        sampled = output.token[row_of[np.column_stack((drafts.parent, drafts.slot[:, :-1]))]]
        right = self.speculator.verify(drafts, sampled, output)
        right &= np.isfinite(output.logprob[row_of[drafts.parent]])[:, None]  # otherwise `take` has left the token out
        if on_device := self.speculator.accepts_on_device:
            right &= self._fail_broken_drafts(drafts, right, output.logprob[row_of[drafts.slot]])[:, None]
        left = np.arange(len(drafts.parent))
        for slot, equal in zip(drafts.slot.T, right.T, strict=True):
            parent = drafts.parent[left]
            follows = equal[left] & np.isfinite(output.logprob[row_of[slot[left]]])
            follows &= table.epoch[parent] == drafts.epoch[left]
            follows &= (table.state[parent] == State.DECODE) | (on_device & (table.state[parent] == State.PREEMPTED))
            left = left[follows]
            if not len(left):
                break
            parent, row = drafts.parent[left], row_of[slot[left]]
            table.length[parent] += 1
            table.moved[parent] = not on_device
            self.speculator.count_accepted(drafts, left)
            reported.append(self._append_rows(parent, output, row))
        return reported

    def _fail_broken_drafts(self, drafts: Drafts, right: np.ndarray, logprob: np.ndarray) -> np.ndarray:
        """Fail requests with accepted rows whose logits are not finite; return which sequences are not of these."""
        broken = (right & ~np.isfinite(logprob)).any(axis=1)
        broken &= self.table.epoch[drafts.parent] == drafts.epoch
        if broken.any():
            self._fail_broken(set(self.table.rid[drafts.parent[broken]].tolist()))
        unbroken: np.ndarray = ~broken
        return unbroken

    def _append_rows(self, slots: Int64, output: StepOutput, rows: np.ndarray) -> Reported:
        """Append the tokens of these rows of the output, advance the grammars of sequences that go on, and report."""
        guided, epoch, token = self.table.guided[slots], self.table.epoch[slots], output.token[rows]
        columns = output.logprob[rows], output.top_token[rows], output.top_logprob[rows]
        reported = self._append_tokens(slots, token, *columns)
        followed = guided & (self.table.epoch[slots] == epoch)
        if followed.any():
            self.grammars.follow(slots[followed], token[followed])
        return reported

    def jump_forward(self) -> list[Reported]:
        """Append the forced tokens of guided sequences that are known by now; return one report per round of tokens.

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
        for at in range(count.max(initial=0)):
            here = ((count > at) & (self.table.epoch[slots] == epoch)).nonzero()[0]
            if len(here):
                token = np.array([runs[i][at] for i in here], np.int32)
                reported.append(self._append_tokens(slots[here], token, *_forced_values(token, top)))
                self.skipped_tokens += len(here)
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
        self, slots: Int64, token: np.ndarray, logprob: np.ndarray, top_token: np.ndarray, top_logprob: np.ndarray
    ) -> Reported:
        """Append one token to each sequence, end the sequences that it ends, and return the report."""
        table = self.table
        self.output_tokens += len(slots)
        table.tokens[slots, table.known[slots]] = token
        table.known[slots] += 1
        if self.speculator is not None:
            self.speculator.note(slots)
        rid, sample = table.rid[slots], table.sample[slots]
        finished = self._end_found(slots, token)
        return Reported(rid, sample, token, logprob, top_token, top_logprob, finished, [], [])

    def _end_stuck(self, slots: Int64) -> list[Finished]:
        """End sequences whose grammar no token can continue; report them as ended by length."""
        finished = self._ended_by_length(slots)
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
        finished = self._ended_by_length(ending)
        self._release(ending)
        return finished

    def _end_found(self, slots: Int64, token: np.ndarray) -> list[Finished]:
        """End the sequences among `slots` that their new token ends, and return their reports."""
        try:
            ended = self._find_ended(slots, token)
        except Exception:
            ended = self._find_ended_by_request(slots, token)
        if ended.finished:
            self._learn(ended.slots, ended.by_stop)
            self._end(ended.slots)
        return ended.finished

    def _find_ended_by_request(self, slots: Int64, token: np.ndarray) -> _Ended:
        """Find ended sequences request by request, after `_find_ended` has raised. A request that raises is at fault.

        The sequences of a request at fault do not end here.
        """
        found = []
        for rid in np.unique(self.table.rid[slots]).tolist():
            own = self.table.rid[slots] == rid
            try:
                found.append(self._find_ended(slots[own], token[own]))
            except Exception as error:
                self.faults.add(rid, error)
        if not found:
            return _Ended(NOBODY, np.zeros(0, np.bool_), [])
        ended, by_stop, _ = zip(*found, strict=True)
        return _Ended(np.concatenate(ended), np.concatenate(by_stop), [end for one in found for end in one.finished])

    def _find_ended(self, slots: Int64, token: np.ndarray) -> _Ended:
        """Find the sequences among `slots` that their new token ends; changes nothing."""
        table = self.table
        flags = self._stop_flags(slots, token)
        at_limit = table.known[slots] >= table.limit[slots]
        may_end = ((flags != 0) | at_limit).nonzero()[0]
        if not flags.any():  # the common case
            ending = slots[may_end]
            return _Ended(ending, np.zeros(len(ending), np.bool_), self._ended_by_length(ending))
        rows = zip(*(column[may_end].tolist() for column in (slots, token, flags, at_limit)), strict=True)
        finished = [self._finished(slot, new, flag, at_limit=full) for slot, new, flag, full in rows]
        ends = np.array([one is not None for one in finished], np.bool_)
        found = [one for one in finished if one is not None]
        return _Ended(slots[may_end][ends], np.array([one.reason != "length" for one in found], np.bool_), found)

    def _stop_flags(self, slots: Int64, token: np.ndarray) -> np.ndarray:
        """Return the flags of `StopSets.classify` for new tokens that may end their sequence; 0 if they cannot.

        Flags of tokens before `min_tokens` are 0. MAYBE_STRING is cleared where the bytes before rule out a match.
        """
        table = self.table
        flags = self.stops.classify(table.stop_set[slots], token)
        flags = np.where(table.known[slots] > table.unstopped_length[slots], flags, 0)
        to_check = (flags & (MAYBE_STRING | WITHIN) == MAYBE_STRING).nonzero()[0]
        if len(to_check):
            of = slots[to_check]
            rows = TokenRows(table.tokens, of, table.prompt_len[of], table.known[of] - 1)
            impossible = to_check[~self.stops.possible(table.stop_set[of], rows)]
            flags[impossible] &= END | STOP_ID
        return flags

    def _finished(self, slot: int, token: int, flags: int, *, at_limit: bool) -> Finished | None:
        """Return the report of the slot's sequence if the new token ends it; None if it does not."""
        table = self.table
        first, known = table.prompt_len[slot], table.known[slot]
        whose = int(table.rid[slot]), int(table.sample[slot])
        tokens = int(known - first)
        # A stop string that ends with an end token still has to be cut from the text.
        if flags & MAYBE_STRING:
            hit = self.stops.find(int(table.stop_set[slot]), table.tokens[slot, first:known])
            if hit is not None:
                return Finished(*whose, "stop", tokens, hit.stop, hit.cut)
        if flags & (END | STOP_ID):
            return Finished(*whose, "stop", tokens, None if flags & END else token)
        return Finished(*whose, "length", tokens) if at_limit else None

    def _learn(self, slots: Int64, ended: np.ndarray) -> None:
        """Update the length model with sequences that have ended; `ended`: by a stop and not by length."""
        table = self.table
        prompt, known, limit = table.prompt_len[slots], table.known[slots], table.limit[slots]
        columns = (table.followed[slots], known - prompt, limit - prompt)
        seen, lengths, limits = (column.astype(np.int64) for column in columns)
        self.lengths.observe(seen, lengths, limits, ended)

    def _ended_by_length(self, slots: Int64) -> list[Finished]:
        """Return the reports of sequences that end by length."""
        table = self.table
        columns = table.rid[slots], table.sample[slots], table.known[slots] - table.prompt_len[slots]
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


def merge_reports(rounds: list[Reported]) -> Reported:
    """Concatenate rounds of tokens to one report; prompt outputs are those of the first. No rounds: an empty report."""
    if len(rounds) < 2:
        return rounds[0] if rounds else EMPTY_REPORT
    top = max(one.top_token.shape[1] for one in rounds)
    columns = list(zip(*(_widen(one, top) for one in rounds), strict=True))[:6]
    rid, sample, token, logprob, top_token, top_logprob = (np.concatenate(part) for part in columns)
    finished = [end for one in rounds for end in one.finished]
    return Reported(rid, sample, token, logprob, top_token, top_logprob, finished, *rounds[0][7:])


def _widen(one: Reported, top: int) -> Reported:
    """Return the report with `top` most likely tokens per row, padded with tokens of log-probability −inf."""
    more = ((0, 0), (0, top - one.top_token.shape[1]))
    if not more[1][1]:
        return one
    logprob = np.pad(one.top_logprob, more, constant_values=-np.inf)
    return one._replace(top_token=np.pad(one.top_token, more), top_logprob=logprob)


def _empty_report(top: int) -> Reported:
    columns = NOBODY, EMPTY, EMPTY, np.empty(0, np.float32), EMPTY.reshape(0, top), np.empty((0, top), np.float32)
    return Reported(*columns, [], [], [])


EMPTY_REPORT = _empty_report(0)


def _forced_values(token: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the log-probabilities of forced tokens, and their `top` most likely tokens with log-probabilities.

    A forced token has log-probability 0 and is the most likely one; the others are padding of log-probability −inf.
    """
    top_token, top_logprob = np.zeros((len(token), top), np.int32), np.full((len(token), top), -np.inf, np.float32)
    top_token[:, :1], top_logprob[:, :1] = token[:, None], 0.0
    return np.zeros(len(token), np.float32), top_token, top_logprob

"""Draft the next tokens of sequences, and let decode rows of the next step verify them.

Legend: n sequences with a draft, k tokens of the longest draft.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from tok_core.config import MAX_DRAFT_TOKENS, MAX_DRAFTING
from tok_core.manager.kv_cache import Paging
from tok_core.manager.requests import Request
from tok_core.manager.sequences import State, microbatch_count
from tok_core.manager.speculation.acceptance import Acceptance
from tok_core.manager.speculation.draft_model import DraftModel
from tok_core.manager.speculation.drafts import (
    MAX_GUIDED_DRAFT,
    MIN_GUIDED_PROBABILITY,
    NO_ROWS,
    Drafts,
    LentRows,
    falling,
    family_of,
    longest_draft,
    no_tokens,
    reserve_pages,
)
from tok_core.manager.speculation.ngram_index import MAX_CONTEXT, NO_TOKEN, NgramIndex, UInt64
from tok_core.manager.speculation.step_costs import DraftCandidate, StepCosts
from tok_core.messages import EngineInfo, Float64, Int32, Int64, StepInput, StepOutput

MAX_LEARNT: Final = MAX_DRAFTING  # tokens learned in a step; bounds the CPU's time
LAZY_STEPS: Final = 4  # steps; while nothing is drafted, their tokens are learned together
MAX_LAZINESS: Final = 4  # factor of LAZY_STEPS while nothing is predicted either
MIN_PREDICTED: Final = 0.1  # expected accepted tokens per sequence; fewer count as no prediction
MAX_PROMPT_TOKENS: Final = 8192  # last tokens of a prompt that are learned
MAX_PROMPT_PARTS: Final = 1024  # newest parts of prompts that wait to be learned, of up to MAX_LEARNT tokens each
MODEL_PASSES: Final = (1, 2, 3, 4, 6, 8, 12, 16)  # of the draft model that a step may have; each is compared
FROM_MODEL: Final = -2  # in a draft: a token that the draft model will draft

HALF: Final = np.uint64(32)


class HostSpeculator:
    """Speculative decoding in which the manager accepts drafts: a `DraftModel` drafts, or an `NgramIndex` on the host.

    A draft of k tokens adds k decode rows to the step, each in an unused slot that is lent for this step. Row i feeds
    the i-th drafted token at its position. All rows write to the sequence's own pages before any row reads them. They
    sample with the sequence's parameters, seed and sample number:

        known tokens … a b;  draft c d;  rows (b, p) (c, p + 1) (d, p + 2) sample c, x, y:  c and x are kept

    Sampling is keyed by (seed, sample, position), so a row whose context is right samples the token of plain decoding.
    A drafted token is accepted if it equals the token sampled at its position; the sampled token is kept either way.
    So a drafted token is accepted with its probability, as in rejection sampling from a deterministic draft (Leviathan
    et al. 2023). Tokens are those of plain decoding at every temperature, up to the rounding of steps of other sizes.

    A draft begins after a sequence's last known token. So no step of a sequence is launched while one with its drafts
    is in flight, nor while drafts will pay once the steps in flight have returned (`waits`). Without a pipeline, that
    means no step at all; in a pipeline, microbatches take turns, and each waits for its own values.

    `Acceptance` estimates the share of right predictions of a family. The product of the shares up to a drafted token
    is the probability that it is accepted. `StepCosts` chooses how many of all sequences' drafted tokens a step
    verifies, the most probable first, or none.

    Drafts of guided sequences are sent to their grammar's worker with the last known token. The worker returns masks
    for the drafted tokens that the grammar allows, and only these are drafted (`draft_guided`).

    The tokens of a draft model exist on the device only, until the step returns. It samples with the parameters, seed
    and sample number of the sequence, so that it mostly takes the target model's token where both agree about the
    probabilities, at every temperature. A sequence is drafted by whichever of index and model promises more accepted
    tokens, if the model's passes pay at all.

    tokens  maximum tokens to draft for a sequence, by assumed step times; auto: by measured ones
    info    sizes of the engine, and whether it has a draft model
    stages  pipeline stages

    draft_steps      steps that verified drafts
    drafted_tokens   tokens drafted
    accepted_tokens  drafted tokens accepted; each saves its sample a step
    """

    predicted_tokens = 0
    drafts_ahead = False
    accepts_on_device = False

    def __init__(self, paging: Paging, tokens: int | Literal["auto"], info: EngineInfo, *, stages: int = 1) -> None:
        self.draft_steps = 0
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.waits = False
        self.index = NgramIndex()
        self.acceptance = Acceptance()
        self.costs = StepCosts(measured=tokens == "auto", pass_share=info.draft_share, stages=stages)
        self.model = DraftModel(paging, info) if info.draft_len else None
        self._table = paging.table
        self._paging = paging
        self._max_draft = MAX_DRAFT_TOKENS if tokens == "auto" else tokens
        self._in_flight = deque[Drafts]()
        self._microbatches = microbatch_count(stages)
        self._appended: list[tuple[Int64, Int64]] = []  # slots and positions of tokens since the last `learn`
        self._unlearned: list[tuple[UInt64, Int32, Int32]] = []  # families, windows and tokens, not yet in the index
        self._prompts = deque[tuple[int, Int32]](maxlen=MAX_PROMPT_PARTS)  # salts and parts of prompts, to be learned
        self._idle_turns = 0  # calls of `learn` since a step with drafts was sent
        self._unpredicted = 0  # consecutive turns that considered drafts and predicted hardly a token
        self._considers = True  # whether this turn considers drafts; few do while none were made lately
        self._waited = False  # whether the next step was held back for drafts
        self._accepted_before = 0

    @property
    def counters(self) -> tuple[int, int, int, int, int]:
        """Return `draft_steps`, `drafted_tokens` and `accepted_tokens`, then those of the draft model's tokens."""
        of_model = (0, 0) if self.model is None else (self.model.drafted_tokens, self.model.accepted_tokens)
        return self.draft_steps, self.drafted_tokens, self.accepted_tokens, *of_model

    @property
    def active(self) -> bool:
        """Return whether one of the latest steps had drafts."""
        return self._idle_turns <= LAZY_STEPS * self._microbatches

    def open(self, request: Request) -> None:
        """Take note of the prompt of a new request, which `learn` will learn in parts."""
        request.family = family_of(request)
        prompt, salt_number = request.prompt[-MAX_PROMPT_TOKENS:].copy(), request.family >> 32
        parts = (prompt[at : at + MAX_LEARNT] for at in range(0, len(prompt), MAX_LEARNT))
        self._prompts.extend((salt_number, part) for part in parts)

    def note(self, slots: Int64, known: Int32) -> None:
        """Remember the new tokens for `learn`, or every k-th one beyond MAX_LEARNT (`Speculation.note`)."""
        every = max(1, -(-len(slots) // MAX_LEARNT))
        self._appended.append((slots[::every], known[::every].astype(np.int64) - 1))

    def sent(self, step: StepInput) -> None:
        """Record the rows of a step that was sent, and forget the masks of its rows."""
        drafted = 0
        if self._in_flight and self._in_flight[-1].step == step.step:
            lent = self._in_flight[-1].lent
            self._table.held[lent] = False
            self._table.draft_masks.clear()
            drafted = len(lent)
        again = 0.0 if self.model is None or step.drafts is None else self.model.share_read_again(step.drafts)
        self.costs.sent(step, drafted, waited=self._waited, read_again=again)
        self._waited = self.waits

    def observe(self, output: StepOutput, now: float) -> None:
        """Learn how long the oldest step in flight took, once its drafts are accepted or rejected."""
        accepted, self._accepted_before = self.accepted_tokens - self._accepted_before, self.accepted_tokens
        seconds = output.device_seconds, output.draft_seconds, output.capture_seconds
        self.costs.returned(now, accepted, *seconds)

    def learn(self, decode: Int64, in_flight: int) -> None:
        """Gather the noted tokens; decide whether the next step waits for the steps in flight, to verify drafts.

        Call this before slots of ended sequences are assigned again.

        decode  slots that decode in the next step
        """
        table = self._table
        if self._appended:
            slots, position = (np.concatenate(part) for part in zip(*self._appended, strict=True))
            self._appended = []
            self._unlearned.append((table.family[slots], self._windows(slots, position), table.tokens[slots, position]))
        self._idle_turns += 1
        lazy = LAZY_STEPS * min(1 + self._unpredicted // LAZY_STEPS, MAX_LAZINESS)
        many = sum(len(token) for _, _, token in self._unlearned) >= MAX_LEARNT
        # Each microbatch has a turn that considers drafts.
        self._considers = self.active or self.waits or many or self._idle_turns // self._microbatches % lazy == 0
        self.waits = bool(self._in_flight)
        if not self._considers:
            return
        self._unpredicted += 1
        if in_flight and not self.waits and not len(table.in_state(State.PREFILL)):
            # The tokens in flight are unknown: what can be drafted now stands for what can be drafted after them.
            drafts = self._draft(decode[~table.guided[decode]], table.lendable_slots, len(decode))
            self.waits = bool((drafts != NO_TOKEN).any())
        self._waited |= self.waits

    def add_to_index(self) -> None:
        """Add what `learn` has gathered to the index. Call this after a step is sent, so that none waits for it."""
        if not self._considers:
            return
        self._add()
        if self._prompts and len(self._table.in_state(State.DECODE)) <= MAX_LEARNT:
            self.index.add_text(*self._prompts.popleft())

    def propose(self, slots: Int64, count: int) -> tuple[Int32, Float64]:
        """Return up to `count` tokens that may follow each slot's last known token, and their probabilities.

        Both are `[n, count]`. A probability holds for a token and all before it together.
        """
        table = self._table
        family = table.family[slots]
        drafts = self.index.draft(family >> HALF, self._windows(slots, table.known[slots]), count)
        share = self.acceptance.share(family[:, None], drafts.score)
        return drafts.token, np.cumprod(share, axis=1, out=share)

    def draft_guided(self, slots: Int64) -> list[tuple[list[int], list[float]]]:
        """Return a draft for each guided sequence: tokens after its last known one, and their probabilities."""
        if not len(slots) or len(slots) > MAX_LEARNT:
            return [([], [])] * len(slots)
        token, probability = self.propose(slots, min(self._max_draft, MAX_GUIDED_DRAFT))
        count = np.count_nonzero((token != NO_TOKEN) & (probability >= MIN_GUIDED_PROBABILITY), axis=1).tolist()
        rows = zip(token.tolist(), probability.tolist(), count, strict=True)
        return [(tokens[:n], chances[:n]) for tokens, chances, n in rows]

    def lend_rows(self, step: int, decode: Int64, others: int, budget: int) -> LentRows:
        """Draft tokens for those of `decode` whose last token is known (`Speculation.lend_rows`)."""
        table, rows = self._table, len(decode) + others
        parents = decode[table.known[decode] == table.length[decode] + 1]
        if not self._considers:
            parents = parents[table.guided[parents]]
        if not len(parents):
            return NO_ROWS
        token = self._draft(parents, min(budget - rows, table.lendable_slots), rows)
        drafted = token != NO_TOKEN
        parents, token, drafted = (array[drafted.any(axis=1)] for array in (parents, token, drafted))
        length = table.length[parents] + 1 + drafted.sum(axis=1)
        if not len(parents) or not reserve_pages(self._paging, parents, length):
            return NO_ROWS
        chunks = np.empty((3, 0), np.int64)
        modelled = token[:, 0] == FROM_MODEL
        if self.model is not None and modelled.any():
            chunks = self.model.read(parents[modelled])
            ready = ~modelled | self.model.is_ready(parents)
            order = ready.nonzero()[0][np.argsort(~modelled[ready], kind="stable")]
            parents, token, drafted, modelled = (array[order] for array in (parents, token, drafted, modelled))
        slots, models = np.full(token.shape, -1), int(np.count_nonzero(modelled))
        if len(parents):
            slots[drafted] = table.lend(parents[drafted.nonzero()[0]])
            self._fill_rows(Drafts(step, parents, table.epoch[parents], slots, token, models))
        model_drafts = None
        if self.model is not None and (chunks.size or models):
            model_drafts = self.model.write(chunks, parents[:models], slots[:models])
            self.waits = True  # a sequence that is read now drafts in the next step
        return LentRows(slots[drafted], parents[drafted.nonzero()[0]], model_drafts=model_drafts)

    def _fill_rows(self, drafts: Drafts) -> None:
        """Fill the slots lent, which feed the drafted tokens at the next positions, and take note of the drafts."""
        table, lent = self._table, drafts.lent
        row, column = (drafts.slot >= 0).nonzero()
        parents, token = drafts.parent[row], drafts.token[row, column]
        table.length[lent] += 1 + column.astype(np.int32)
        table.known[lent] = table.length[lent] + 1
        table.tokens[lent, table.length[lent]] = np.maximum(token, 0)
        for i in table.guided[parents].nonzero()[0].tolist():
            table.draft_masks[int(lent[i])] = table.matchers[int(parents[i])].ahead[column[i]]
        self._in_flight.append(drafts)
        self.waits = True
        self._idle_turns = 0
        self.draft_steps += 1
        self.drafted_tokens += len(lent)

    def returned(self, output: StepOutput) -> Drafts | None:
        """Return the drafts that this step has verified, if any."""
        if not self._in_flight or self._in_flight[0].step != output.step:
            return None
        drafts = self._in_flight.popleft()
        if not drafts.models:
            return drafts
        token = drafts.token.copy()
        own = token[: drafts.models, : output.draft_token.shape[1]]
        own[own == FROM_MODEL] = output.draft_token[own == FROM_MODEL]
        return drafts._replace(token=token)

    def verify(self, drafts: Drafts, rows: Int64, output: StepOutput) -> NDArray[np.bool_]:
        """Return which drafted tokens equal those sampled at their positions (`Speculation.verify`).

        Tokens whose row, or whose sequence's row, has logits that are not finite do not count.
        """
        right: NDArray[np.bool_] = (output.token[rows[:, :-1]] == drafts.token) & (drafts.slot >= 0)
        finite = np.isfinite(output.logprob[rows])
        right &= finite[:, 1:] & finite[:, :1]
        self.verified(drafts, right)
        return right

    def verified(self, drafts: Drafts, right: NDArray[np.bool_]) -> None:
        """Let the draft model learn which of its drafted tokens equal those sampled at their positions, `[n, k]`."""
        if self.model is None or not drafts.models:
            return
        table, parents = self._table, drafts.parent[: drafts.models]
        live = (table.epoch[parents] == drafts.epoch[: drafts.models]) & (table.state[parents] == State.DECODE)
        drafted = (drafts.slot[: drafts.models] >= 0).sum(axis=1)
        accepted = np.cumprod(right[: drafts.models], axis=1).sum(axis=1)
        self.model.verified(parents, live, drafted, accepted)

    def count_accepted(self, drafts: Drafts, rows: Int64) -> None:
        """Count a token of each of these rows of the drafts as accepted."""
        self.accepted_tokens += len(rows)
        if self.model is not None:
            self.model.accepted_tokens += int(np.count_nonzero(rows < drafts.models))

    def _add(self) -> None:
        """Add the remembered tokens to the index, and count those that it had predicted."""
        if self._unlearned:
            families, windows, tokens = zip(*self._unlearned, strict=True)
            self._unlearned = []
            family, token = np.concatenate(families), np.concatenate(tokens)
            predicted = self.index.add(family >> HALF, np.concatenate(windows, axis=1), token)
            self.acceptance.observe(family, predicted.score, predicted.token == token)

    def _draft(self, slots: Int64, room: int, rows: int) -> Int32:
        """Return the drafts that make a step of `rows` rows fastest per token, `[n, k]`, with up to `room` tokens.

        Drafts stay within the limits of their sequences.
        """
        table, most = self._table, longest_draft(self._max_draft, len(slots))
        if room <= 0 or not 0 < len(slots) <= MAX_LEARNT or not self.costs.allows(rows):
            return no_tokens(len(slots))
        shape = len(slots), most
        token, probability = no_tokens(*shape), np.zeros(shape)
        guided = table.guided[slots]
        if not guided.all():
            token[~guided], probability[~guided] = self.propose(slots[~guided], most)
        for row in guided.nonzero()[0].tolist():  # the grammar has already cut these drafts
            if (matcher := table.matchers.get(int(slots[row]))) is not None:
                allowed = min(len(matcher.ahead), most)
                token[row, :allowed], probability[row, :allowed] = (one[:allowed] for one in matcher.draft)
        left = table.limit[slots] - table.known[slots]
        beyond = np.arange(most) + 1 >= left[:, None]
        probability[(token == NO_TOKEN) | beyond] = 0
        own = np.zeros_like(probability)
        if self.model is not None:
            own = self.model.probabilities(slots, most)
            own[beyond] = 0
        if max(probability.sum(), own.sum()) >= MIN_PREDICTED * rows:
            self._unpredicted = 0
        modelled = own.sum(axis=1) > probability.sum(axis=1)
        order = falling(probability)[:room]
        if not modelled.any():
            used = order[: self.costs.choose(rows, probability.ravel()[order])]
        else:
            used, with_model = self._choose_source(rows, room, probability, own, modelled)
            if with_model:
                token[modelled] = FROM_MODEL
        unused = np.ones(token.size, np.bool_)
        unused[used] = False
        token[unused.reshape(token.shape)] = NO_TOKEN
        return token[:, : max(1, int((token != NO_TOKEN).sum(axis=1).max()))]

    def _choose_source(
        self, rows: int, room: int, probability: Float64, own: Float64, modelled: NDArray[np.bool_]
    ) -> tuple[Int64, bool]:
        """Return which tokens of all drafts pay most together, at most `room`, and whether the draft model drafts.

        The index drafts with `probability`, `[n, k]`. With the model, it drafts the rows `modelled` with `own`: one
        token of each in a pass.
        """
        mixed = np.where(modelled[:, None], own, probability)
        order, most = falling(mixed), mixed.shape[1]
        by_pass = np.where(modelled[order // most], order % most, -1)
        passes = [count for count in MODEL_PASSES if count < most] + [most]
        used = [falling(probability)[:room], *(order[by_pass < count][:room] for count in passes)]
        candidates = [DraftCandidate(probability.ravel()[used[0]])]
        candidates += [DraftCandidate(mixed.ravel()[one], count) for one, count in zip(used[1:], passes, strict=True)]
        best, count = self.costs.choose_among(rows, candidates)
        return used[best][:count], best > 0

    def _windows(self, slots: Int64, end: Int64 | Int32) -> Int32:
        """Return the tokens of each slot before position `end`, `[W, n]`."""
        position = end - MAX_CONTEXT + np.arange(MAX_CONTEXT)[:, None]
        windows: Int32 = np.where(position >= 0, self._table.tokens[slots, np.maximum(position, 0)], np.int32(NO_TOKEN))
        return windows

"""Advance sequences in a compiled grammar and compute the mask of tokens that each may sample next.

A worker process runs one `Matchers` for its grammar (`tok_core.grammar.worker_processes.worker`). An engine within one
process runs its own (`tok_core.grammar.local`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec
import numpy as np

from tok_core.grammar.masks import Mask, MaskCache

if TYPE_CHECKING:
    import xgrammar

    from tok_core.grammar.compiler import Compiled

MIN_RUN = 3  # forced tokens in a row that are computed at once; fewer are sampled one by one in decode rows
MAX_RUN = 512  # tokens of a run after which no further forced tokens are looked up in one call
MAX_KNOWN_MASKS = 256  # masks that a worker and its manager know by number: 5 MB for a vocabulary of 150 000
REPLAY = -1  # as `FollowRequest.room`: only advance the matcher, return neither run nor mask


class FollowRequest(msgspec.Struct, array_like=True):
    """Request to advance one sequence by `tokens`. An unknown `sequence` starts a new matcher.

    room   how many more tokens the sequence may get, or REPLAY
    draft  tokens that may follow `tokens`: the masks after them are computed, too, as far as the grammar allows them
    """

    sequence: int
    tokens: list[int]
    room: int
    draft: list[int] = []


class FollowResult(msgspec.Struct, array_like=True):
    """Result of one `FollowRequest`: the continuation that the grammar allows.

    run      forced tokens (the grammar allows no others), which need no sampling
    given    forced tokens that are too few to skip sampling: sampled one by one after `run`; in reverse order
    mask     number of the mask of the tokens allowed after `run` and `given`; −1 without one
    stuck    no token is allowed: the grammar cannot continue with this vocabulary
    drafted  numbers of the masks after each token of the draft that the grammar allows; none if tokens are forced
    refused  what is allowed instead, if the sequence exceeded its limits and is no longer followed; else ""
    failed   other error because of which the sequence is no longer followed; else ""
    """

    sequence: int
    run: list[int] = []
    given: list[int] = []
    mask: int = -1
    stuck: bool = False
    refused: str = ""
    failed: str = ""
    drafted: list[int] = []


class MatcherCall(msgspec.Struct, array_like=True):
    """Message to a worker: sequences to advance, and sequences that have ended."""

    follow: list[FollowRequest]
    ended: list[int]


class MatcherReply(msgspec.Struct, array_like=True):
    """Message from a worker: results of sequences, and new masks as packed words, numbered from `first` on."""

    followed: list[FollowResult]
    first: int
    masks: list[bytes]


class Verdict(msgspec.Struct, array_like=True):
    """First message of a worker: whether the grammar can be used.

    allowed  what is allowed instead, if the grammar is refused; else ""
    failed   error that prevented the check; else ""
    begin    first byte of each token, int16 [V]; see `MaskCache`
    first    packed mask of the tokens that may begin a text
    """

    allowed: str = ""
    failed: str = ""
    begin: bytes = b""
    first: bytes = b""


class MatcherMeter(Protocol):
    """Limits on the resources that one sequence may use in a worker."""

    def start(self, sequence: int) -> None:
        """Start measuring: the worker begins to advance `sequence`."""
        ...

    def stop(self, sequence: int, tokens: int) -> str:
        """Stop measuring after `tokens` tokens. Return what is allowed instead if a limit is exceeded, "" otherwise."""
        ...

    def drop(self, sequence: int) -> None:
        """Discard the records of a sequence that has ended."""
        ...


class _Settled(NamedTuple):
    tokens: list[int]
    over: bool


class Matchers:
    """Matchers of one grammar's sequences, each advanced to the next position at which the grammar leaves a choice."""

    def __init__(self, compiled: Compiled, meter: MatcherMeter | None = None) -> None:
        self._compiled = compiled
        self._meter = meter
        self._masks = MaskCache(compiled.begin)
        self._matchers: dict[int, xgrammar.GrammarMatcher] = {}
        self._last: dict[int, Mask] = {}
        self._numbers: dict[bytes, int] = {}
        self._count = 0
        self._new: list[bytes] = []
        self._words = np.zeros((1, self._masks.words), np.int32)

    def end(self, sequences: list[int]) -> None:
        """Drop the matchers of ended sequences; ignore unknown sequences."""
        for sequence in sequences:
            self._matchers.pop(sequence, None)
            self._last.pop(sequence, None)
            if self._meter is not None:
                self._meter.drop(sequence)

    def answer(self, followed: list[FollowResult]) -> MatcherReply:
        """Return the reply with these results and the masks numbered since the last call."""
        new, self._new = self._new, []
        return MatcherReply(followed, self._count - len(new), new)

    def follow(self, one: FollowRequest) -> FollowResult:
        """Advance one sequence. Raise MemoryError if xgrammar runs out of memory: the process must end then."""
        try:
            return self._metered(one)
        except Exception as error:
            if "bad_alloc" in str(error):
                raise MemoryError from None
            self.end([one.sequence])
            reason = f"the grammar cannot be followed: {type(error).__name__}: {str(error)[:300]}"
            return FollowResult(one.sequence, failed=reason)

    def _metered(self, one: FollowRequest) -> FollowResult:
        if self._meter is None:
            return self._follow(one)
        self._meter.start(one.sequence)
        found = self._follow(one)
        refused = self._meter.stop(one.sequence, len(one.tokens + found.run + found.given + found.drafted))
        if refused:
            self.end([one.sequence])
            return FollowResult(one.sequence, refused=refused)
        return found

    def _follow(self, one: FollowRequest) -> FollowResult:
        matcher = self._matchers.get(one.sequence)
        if matcher is None:
            matcher = self._matchers[one.sequence] = self._compiled.matcher()
        if not all(map(matcher.accept_token, one.tokens)):
            return FollowResult(one.sequence, stuck=True)
        if one.room == REPLAY:
            return FollowResult(one.sequence)
        run: list[int] = []
        most = min(one.room, MAX_RUN)
        while True:
            mask = self._fill(one.sequence, matcher)
            more = self._settled(matcher, mask) if len(run) < most else _Settled([], over=False)
            run += more.tokens
            if more.over:
                return FollowResult(one.sequence, run, [], self._number(mask))
            if not more.tokens:
                break
        if mask.none:
            return FollowResult(one.sequence, run, stuck=True)
        if 0 < len(run) < min(one.room, MIN_RUN):
            return FollowResult(one.sequence, [], run[::-1], self._number(mask))
        drafted = [] if run else self._try(one, matcher, mask)
        return FollowResult(one.sequence, run, [], self._number(mask), drafted=drafted)

    def _try(self, one: FollowRequest, matcher: xgrammar.GrammarMatcher, mask: Mask) -> list[int]:
        """Return the numbers of the masks after the draft's tokens; `mask` is the one before them.

        The last one is that before a token that is not allowed, that ends the text, or after which tokens are forced.
        """
        masks, accepted = list[Mask](), 0
        for token in one.draft:
            # xgrammar (0.2.8) prints a warning for each special token that it refuses.
            if not mask.allows(token) or not matcher.accept_token(token):
                break
            accepted += 1
            if matcher.is_terminated():
                break
            mask = self._fill(one.sequence, matcher)
            if mask.none or mask.only >= 0 or (mask.alike and self._spelt(matcher)):
                break
            masks.append(mask)
        if accepted:
            matcher.rollback(accepted)
        return [self._number(mask) for mask in masks]

    def _fill(self, sequence: int, matcher: xgrammar.GrammarMatcher) -> Mask:
        self._words.fill(0)
        matcher.fill_next_token_bitmask(self._words)
        (mask,) = self._masks.of_many(self._words, [self._last.get(sequence)])
        self._last[sequence] = mask
        return mask

    def _number(self, mask: Mask) -> int:
        number = self._numbers.get(mask.key)
        if number is None:
            if len(self._numbers) >= MAX_KNOWN_MASKS:
                self._numbers.clear()
            number = self._numbers[mask.key] = self._count
            self._count += 1
            self._new.append(mask.key)
        return number

    def _settled(self, matcher: xgrammar.GrammarMatcher, mask: Mask) -> _Settled:
        """Accept and return the forced tokens that come next; `mask` is the mask before them.

        These are the mask's only token, or the tokens of the only possible text as the tokenizer would write it.
        """
        tokens = [mask.only] if mask.only >= 0 else self._spelt(matcher) if mask.alike else []
        for at, token in enumerate(tokens):
            if not matcher.accept_token(token):
                return _Settled(tokens[:at], over=False)
        return _Settled(tokens, over=bool(tokens) and matcher.is_terminated())

    def _spelt(self, matcher: xgrammar.GrammarMatcher) -> list[int]:
        try:
            text = matcher.find_jump_forward_string()
        except UnicodeDecodeError as error:  # xgrammar (0.2.8) may start and end within a character
            text = error.object[: error.start].decode()
        return list(self._compiled.lead(text)) if len(text) > 1 else []

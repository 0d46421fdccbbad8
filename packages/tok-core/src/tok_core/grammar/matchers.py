"""Matchers: how far each sequence under one compiled grammar has come, and which tokens may come next.

A worker process follows the sequences of one grammar (`grammar.worker`); an engine within one process follows its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec
import numpy as np

from tok_core.grammar.masks import Mask, MaskCache

if TYPE_CHECKING:
    import xgrammar

    from tok_core.grammar.compiler import Compiled

MIN_RUN = 3  # tokens in a row, without a choice, that are computed at once: fewer are sampled one by one in decode rows
MAX_RUN = 512  # tokens after which no more are looked for in one go
MAX_KNOWN_MASKS = 256  # that a worker and its manager know by number: 5 MB, for a vocabulary of 150 000
REPLAY = -1  # as `Follow.room`: nothing is asked, the matcher only catches up


class Follow(msgspec.Struct, array_like=True):
    """A sequence has got `tokens`, and may have `room` more. A sequence that is not known begins with them."""

    sequence: int
    tokens: list[int]
    room: int


class Followed(msgspec.Struct, array_like=True):
    """The continuation that a grammar allows in a sequence.

    run      tokens about which there is no choice, and that nobody need sample
    given    tokens without a choice that are sampled one by one all the same, the last first; after `run`
    mask     number of the mask of the tokens that may come then
    stuck    nothing may come: the grammar cannot be followed on with this vocabulary
    refused  what is allowed instead of a grammar that has taken too much, and is not followed on; "" if it has not
    failed   why it cannot be followed on otherwise; "" if it can
    """

    sequence: int
    run: list[int] = []
    given: list[int] = []
    mask: int = -1
    stuck: bool = False
    refused: str = ""
    failed: str = ""


class MatcherCall(msgspec.Struct, array_like=True):
    """For a worker: sequences to follow, and others that have ended."""

    follow: list[Follow]
    ended: list[int]


class MatcherReply(msgspec.Struct, array_like=True):
    """A worker's answer about followed sequences; `masks` are packed words, the first of them has number `first`."""

    followed: list[Followed]
    first: int
    masks: list[bytes]


class Verdict(msgspec.Struct, array_like=True):
    """The first that a worker says.

    allowed  what is allowed instead of the grammar; "" if it is itself
    failed   why it cannot be told; "" if it can
    begin    first byte of each token, int16 [V]; see `Masks`
    first    packed words of the tokens that may begin a text
    """

    allowed: str = ""
    failed: str = ""
    begin: bytes = b""
    first: bytes = b""


class MatcherMeter(Protocol):
    """Bounds what one sequence may take of a worker."""

    def start(self, sequence: int) -> None:
        """The worker turns to a sequence."""
        ...

    def stop(self, sequence: int, tokens: int) -> str:
        """It has followed so many tokens; returns what is allowed instead, "" if the sequence is within its bounds."""
        ...

    def forget(self, sequence: int) -> None:
        """The sequence has ended."""
        ...


class _Settled(NamedTuple):
    tokens: list[int]
    over: bool


class Matchers:
    """Follows the sequences of one grammar, each as far as its next choice."""

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
        """Lets go of sequences; of those that are not known, nothing."""
        for sequence in sequences:
            self._matchers.pop(sequence, None)
            self._last.pop(sequence, None)
            if self._meter is not None:
                self._meter.forget(sequence)

    def answer(self, followed: list[Followed]) -> MatcherReply:
        """Return the message about the sequences followed since the last call."""
        new, self._new = self._new, []
        return MatcherReply(followed, self._count - len(new), new)

    def follow(self, one: Follow) -> Followed:
        """Follows one sequence. Raises MemoryError: the process is not to go on then."""
        try:
            return self._metered(one)
        except Exception as error:
            if "bad_alloc" in str(error):
                raise MemoryError from None
            self.end([one.sequence])
            reason = f"the grammar cannot be followed: {type(error).__name__}: {str(error)[:300]}"
            return Followed(one.sequence, failed=reason)

    def _metered(self, one: Follow) -> Followed:
        if self._meter is None:
            return self._follow(one)
        self._meter.start(one.sequence)
        found = self._follow(one)
        refused = self._meter.stop(one.sequence, len(one.tokens) + len(found.run) + len(found.given))
        if refused:
            self.end([one.sequence])
            return Followed(one.sequence, refused=refused)
        return found

    def _follow(self, one: Follow) -> Followed:
        matcher = self._matchers.get(one.sequence)
        if matcher is None:
            matcher = self._matchers[one.sequence] = self._compiled.matcher()
        if not all(map(matcher.accept_token, one.tokens)):
            return Followed(one.sequence, stuck=True)
        if one.room == REPLAY:
            return Followed(one.sequence)
        run: list[int] = []
        most = min(one.room, MAX_RUN)
        while True:
            mask = self._fill(one.sequence, matcher)
            more = self._settled(matcher, mask) if len(run) < most else _Settled([], over=False)
            run += more.tokens
            if more.over:
                return Followed(one.sequence, run, [], self._number(mask))
            if not more.tokens:
                break
        if mask.none:
            return Followed(one.sequence, run, stuck=True)
        if len(run) < min(one.room, MIN_RUN):
            return Followed(one.sequence, [], run[::-1], self._number(mask))
        return Followed(one.sequence, run, [], self._number(mask))

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
        """Tokens that have to come now, which it follows: the only one, or those of the text that is the only one, as
        the tokenizer would write it. `mask` is the one before them."""
        tokens = [mask.only] if mask.only >= 0 else self._spelt(matcher) if mask.alike else []
        for at, token in enumerate(tokens):
            if not matcher.accept_token(token):
                return _Settled(tokens[:at], over=False)
        return _Settled(tokens, over=bool(tokens) and matcher.is_terminated())

    def _spelt(self, matcher: xgrammar.GrammarMatcher) -> list[int]:
        try:
            text = matcher.find_jump_forward_string()
        except UnicodeDecodeError as error:  # xgrammar (0.2.8) stops, and may begin, within a character
            text = error.object[: error.start].decode()
        return list(self._compiled.lead(text)) if len(text) > 1 else []

"""Stop a request's samples early by `stop_when`: count the finished samples' answers until the rule is met.

Answers are found by a regular expression of an untrusted client. RE2 never backtracks, patterns are limited in size,
and only the last bytes of a text are searched. The search time is linear in the text, and quadratic only if a pattern
that looks far ahead matches everywhere; a time limit ends that.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

import msgspec
import re2

from tok_client.types import CompletionRequest, Distinct, FirstMatch, Majority, StopWhen, StopWhenResult, UnsetType
from tok_core import Delta, RequestOutput, RequestStream
from tok_core.text import Tokenizer
from tok_server.openai.generation.params import Request, value_or_none
from tok_server.parsing import NO_MARKUP, Markup, MessageReader, build_message
from tok_server.wire import invalid

MAX_PATTERN_CHARS = 512
MAX_PROGRAM_INSTRUCTIONS = 2048  # instructions of a compiled pattern; a class of Unicode letters takes about 1200
MAX_PATTERN_MEMORY_BYTES = 1 << 20  # bytes of memory for a compiled pattern and its search
SEARCHED_TAIL_BYTES = 1 << 14  # bytes at the end of a text that are searched
MAX_SEARCH_SECONDS = 0.5  # seconds per text
PATTERN_FIELD = "stop_when.pattern"
MAX_LOOP_PATTERN_WORK = 200_000  # bytes × instructions that the event loop searches itself: a few milliseconds at worst


class AnswerPattern:
    """A compiled regular expression whose single group is the answer. Errors: ApiError for an invalid pattern."""

    def __init__(self, pattern: str) -> None:
        if len(pattern) > MAX_PATTERN_CHARS:
            raise invalid(
                PATTERN_FIELD, f"{PATTERN_FIELD} has {len(pattern)} characters; allowed: at most {MAX_PATTERN_CHARS}"
            )
        self._pattern = _compile(pattern)

    @property
    def size(self) -> int:
        """Return the number of compiled instructions; times a text's bytes, it estimates the work of a search."""
        return int(self._pattern.programsize)

    def answer(self, text: str) -> str | None:
        """Return the answer in the last match that has one, else None. Errors: ApiError if the search is too slow."""
        deadline = time.monotonic() + MAX_SEARCH_SECONDS
        answer = None
        # The cut may split a character: its remaining bytes match nothing.
        for found in self._pattern.finditer(text.encode()[-SEARCHED_TAIL_BYTES:]):
            answer = found[1] if found[1] is not None else answer
            if time.monotonic() > deadline:
                raise invalid(
                    PATTERN_FIELD, f"{PATTERN_FIELD} takes more than {MAX_SEARCH_SECONDS} seconds to search one text"
                )
        return None if answer is None else answer.decode(errors="replace")


def _compile(pattern: str) -> Any:
    options = re2.Options()
    options.log_errors = False
    options.max_mem = MAX_PATTERN_MEMORY_BYTES
    try:
        found = re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0].decode(errors="replace")
        raise invalid(
            PATTERN_FIELD, f"{PATTERN_FIELD} is {pattern!r}; allowed: regular expressions of RE2 ({reason})"
        ) from error
    if found.groups != 1:
        raise invalid(
            PATTERN_FIELD, f"{PATTERN_FIELD} is {pattern!r}; allowed: exactly one capturing group, not {found.groups}"
        )
    if found.programsize > MAX_PROGRAM_INSTRUCTIONS:
        reason = f"compiles to {found.programsize} instructions; allowed: at most {MAX_PROGRAM_INSTRUCTIONS}"
        raise invalid(PATTERN_FIELD, f"{PATTERN_FIELD} {reason}")
    return found


@dataclass(frozen=True, slots=True)
class StopWhenRule:
    """A condition on the answers of a prompt's `n` samples. `markup`: the markup that their texts may hold."""

    condition: StopWhen
    pattern: AnswerPattern
    n: int
    markup: Markup

    def answer(self, text: str) -> str | None:
        """Return the answer in a sample's content; reasoning and tool calls are not searched."""
        if self.markup:
            text = build_message(MessageReader(self.markup).pieces(text, ended=True)).content or ""
        return self.pattern.answer(text)


class AnswerTally:
    """Votes by answer. `most_votes` and `next_votes`: votes of the most frequent answer and of the next one."""

    def __init__(self) -> None:
        self.votes: Counter[str] = Counter()
        self.most_votes = self.next_votes = 0
        self._leader: str | None = None

    def vote(self, answer: str) -> None:
        """Count one more vote for this answer."""
        self.votes[answer] += 1
        votes = self.votes[answer]
        if answer == self._leader:
            self.most_votes = votes
        elif votes > self.most_votes:
            self._leader, self.most_votes, self.next_votes = answer, votes, self.most_votes
        else:
            self.next_votes = max(self.next_votes, votes)


def is_met(condition: StopWhen, tally: AnswerTally, remaining: int) -> bool:
    """Return whether the condition is met while `remaining` samples may still vote."""
    match condition:
        case Distinct(count=count):
            return len(tally.votes) >= count
        case Majority(margin=margin):
            lead = tally.most_votes - tally.next_votes
            return lead >= margin or lead > remaining
        case FirstMatch():
            return tally.most_votes > 0
    assert_never(condition)


class StopWhenEvaluator:
    """Evaluator of a rule over one run of one prompt. `met`: the condition is met."""

    def __init__(self, rule: StopWhenRule) -> None:
        self._rule = rule
        self._tally = AnswerTally()
        self._texts: dict[int, list[str]] = {}  # by running sample
        self._finished = self._cancelled = 0
        self.met = False

    async def add(self, batch: Sequence[Delta]) -> None:
        """Add the samples' new deltas, and count the answers of those that finished. Errors: ApiError."""
        texts = self._finished_texts(batch)
        size = sum(map(len, texts)) * self._rule.pattern.size
        answers: Iterable[str | None] = map(self._rule.answer, texts)
        if size > MAX_LOOP_PATTERN_WORK:  # RE2 lets other threads run while it searches
            answers = await asyncio.to_thread(list, answers)
        for answer in answers:
            self._count(answer)

    def result(self) -> StopWhenResult:
        """Return the answers and counts so far."""
        return StopWhenResult(
            met=self.met,
            answers=dict(self._tally.votes.most_common()),
            finished=self._finished,
            cancelled=self._cancelled,
            unmatched=self._finished - self._tally.votes.total(),
        )

    def _finished_texts(self, batch: Sequence[Delta]) -> list[str]:
        """Return the texts of samples that finished by themselves; count the cancelled ones."""
        found = []
        for delta in batch:
            self._texts.setdefault(delta.index, []).append(delta.text)
            if delta.finish_reason is None:
                continue
            text = "".join(self._texts.pop(delta.index))
            if delta.finish_reason == "stop_when":
                self._cancelled += 1
            else:
                found.append(text)
        return found

    def _count(self, answer: str | None) -> None:
        self._finished += 1
        if answer is not None:
            self._tally.vote(answer)
        if is_met(self._rule.condition, self._tally, self._rule.n - self._finished):
            self.met = True


class StopWhenOutput(RequestOutput, kw_only=True):
    """A finished request with the result of its `stop_when` rule."""

    stop_when: StopWhenResult


async def evaluate_stream(
    stream: RequestStream, evaluator: StopWhenEvaluator
) -> AsyncGenerator[tuple[int, list[Delta]]]:
    """Yield the stream's deltas as `merge_streams` does; end its running samples once the rule is met."""
    async for batch in stream.batches():
        await evaluator.add(batch)
        if evaluator.met:
            stream.abort("stop_when")
        yield 0, batch


def wait_for_output(stream: RequestStream, rule: StopWhenRule | None) -> Awaitable[RequestOutput]:
    """Wait for the finished request. A rule ends its running samples once it is met, and gives a StopWhenOutput."""
    return stream.output() if rule is None else _output_with_rule(stream, rule)


async def _output_with_rule(stream: RequestStream, rule: StopWhenRule) -> StopWhenOutput:
    evaluator = StopWhenEvaluator(rule)
    async for _ in evaluate_stream(stream, evaluator):
        pass
    output = await stream.output()
    return StopWhenOutput(**msgspec.structs.asdict(output), stop_when=evaluator.result())


def stop_when_result(outputs: Sequence[RequestOutput]) -> StopWhenResult | None:
    """Return the result of the `stop_when` rule, if there was one."""
    (output, *_) = outputs
    return output.stop_when if isinstance(output, StopWhenOutput) else None


def parse_stop_when(
    request: Request, *, n: int, prompts: int, tokenizer: Tokenizer | None, markup: Markup = NO_MARKUP
) -> StopWhenRule | None:
    """Return the request's rule, if it has one. Errors: ApiError."""
    condition = None if isinstance(request.stop_when, UnsetType) else request.stop_when
    if condition is None:
        return None
    _check_request(request, n, prompts, tokenizer)
    if isinstance(condition, Distinct):
        _check_number("stop_when.count", condition.count, n)
    if isinstance(condition, Majority):
        _check_number("stop_when.margin", condition.margin, n)
    return StopWhenRule(condition, AnswerPattern(condition.pattern), n, markup)


def _check_request(request: Request, n: int, prompts: int, tokenizer: Tokenizer | None) -> None:
    if n < 2:
        raise invalid("stop_when", f"stop_when needs several samples, but n is {n}; allowed: at least 2")
    if prompts > 1:
        raise invalid("stop_when", f"stop_when needs a single prompt, but the request has {prompts}")
    best_of = value_or_none(request.best_of) if isinstance(request, CompletionRequest) else None
    if best_of not in (None, n):
        raise invalid("stop_when", f"stop_when and best_of ({best_of}) exclude each other; allowed: one of them")
    if tokenizer is None:
        raise invalid("stop_when", "stop_when needs text, but the model has no tokenizer")


def _check_number(name: str, value: int, n: int) -> None:
    if not 1 <= value <= n:
        raise invalid(name, f"{name} is {value}; allowed: integers from 1 to n ({n})")

"""Count the answers among one prompt's finished samples and decide when a `stop_when` rule is met."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Sequence
from dataclasses import dataclass
from typing import assert_never

import msgspec

from tok_client.types import Distinct, FirstMatch, Majority, StopWhen, StopWhenResult
from tok_core import Delta, RequestOutput, RequestStream
from tok_server.parsing.answer_pattern import AnswerPattern
from tok_server.parsing.markup import Markup
from tok_server.parsing.message_reader import MessageReader, message

MAX_LOOP_PATTERN_WORK = 200_000  # bytes × instructions that are looked through at once: a few milliseconds at worst


@dataclass(frozen=True, slots=True)
class StopWhenRule:
    """What has to be known of `n` samples of a prompt. `markup`: what their texts hold beside content."""

    wanted: StopWhen
    pattern: AnswerPattern
    n: int
    markup: Markup

    def answer(self, text: str) -> str | None:
        """What a sample of this text answers: in what it says, not in what it thinks or calls."""
        if self.markup:
            reader = MessageReader(self.markup)
            text = message(reader.feed(text) + reader.finish()).content or ""
        return self.pattern.answer(text)


class AnswerTally:
    """Votes by answer. `first` and `second`: what the most frequent answer and the next one have."""

    def __init__(self) -> None:
        self.votes: Counter[str] = Counter()
        self.first = self.second = 0
        self._leader: str | None = None

    def vote(self, answer: str) -> None:
        """One more for this answer."""
        self.votes[answer] += 1
        votes = self.votes[answer]
        if answer == self._leader:
            self.first = votes
        elif votes > self.first:
            self._leader, self.first, self.second = answer, votes, self.first
        else:
            self.second = max(self.second, votes)


def enough(wanted: StopWhen, tally: AnswerTally, left: int) -> bool:
    """Whether the condition is met while `left` samples may still vote."""
    match wanted:
        case Distinct(count=count):
            return len(tally.votes) >= count
        case Majority(margin=margin):
            lead = tally.first - tally.second
            return lead >= margin or lead > left
        case FirstMatch():
            return tally.first > 0
    assert_never(wanted)


class StopWhenJudge:
    """Of one run of one prompt. `met`: enough is known."""

    def __init__(self, rule: StopWhenRule) -> None:
        self._rule = rule
        self._tally = AnswerTally()
        self._texts: dict[int, list[str]] = {}  # of samples that run
        self._finished = self._cancelled = 0
        self.met = False

    async def take(self, batch: Sequence[Delta]) -> None:
        """What samples have gained. Errors: ApiError."""
        texts = self._ended(batch)
        size = sum(map(len, texts)) * self._rule.pattern.size
        find = self._rule.answer
        # RE2 lets other threads run while it searches.
        answers = (
            [find(text) for text in texts]
            if size <= MAX_LOOP_PATTERN_WORK
            else await asyncio.to_thread(list, map(find, texts))
        )
        for answer in answers:
            self._count(answer)

    def result(self) -> StopWhenResult:
        """What is known."""
        return StopWhenResult(
            met=self.met,
            answers=dict(self._tally.votes.most_common()),
            finished=self._finished,
            cancelled=self._cancelled,
            unmatched=self._finished - self._tally.votes.total(),
        )

    def _ended(self, batch: Sequence[Delta]) -> list[str]:
        """The texts of samples that have come to their own end."""
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
        if enough(self._rule.wanted, self._tally, self._rule.n - self._finished):
            self.met = True


class JudgedOutput(RequestOutput, kw_only=True):
    """A finished request whose samples have been judged."""

    stop_when: StopWhenResult


async def judged(stream: RequestStream, judge: StopWhenJudge) -> AsyncGenerator[tuple[int, list[Delta]]]:
    """The stream's deltas as `streams.merged` gives them; ends the samples that still run once enough is known."""
    async for batch in stream.batches():
        await judge.take(batch)
        if judge.met:
            stream.abort("stop_when")
        yield 0, batch


def output_of(stream: RequestStream, rule: StopWhenRule | None) -> Awaitable[RequestOutput]:
    """Waits for the whole request; with a rule for as much of it as that needs, which gives a JudgedOutput."""
    return stream.output() if rule is None else _judged_output(stream, rule)


async def _judged_output(stream: RequestStream, rule: StopWhenRule) -> JudgedOutput:
    judge = StopWhenJudge(rule)
    async for _ in judged(stream, judge):
        pass
    output = await stream.output()
    return JudgedOutput(**msgspec.structs.asdict(output), stop_when=judge.result())


def result_of(outputs: Sequence[RequestOutput]) -> StopWhenResult | None:
    """What the judge has found, if there was one."""
    first = outputs[0]
    return first.stop_when if isinstance(first, JudgedOutput) else None

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
from tok_server.parsing.message_reader import MessageReader, build_message

MAX_LOOP_PATTERN_WORK = 200_000  # bytes × instructions that the event loop searches itself: a few milliseconds at worst


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
            reader = MessageReader(self.markup)
            text = build_message(reader.feed(text) + reader.finish()).content or ""
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
    """Yield the stream's deltas as `generation.streams.merged` does; end its running samples once the rule is met."""
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
    most_votes = outputs[0]
    return most_votes.stop_when if isinstance(most_votes, StopWhenOutput) else None

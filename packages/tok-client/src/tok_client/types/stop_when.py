"""`stop_when`: the condition under which a prompt's running samples are ended early, and its result."""

from __future__ import annotations

from typing import ClassVar, Literal

from tok_client.types.base import Wire


class Distinct(Wire, frozen=True, kw_only=True, tag_field="type", tag="distinct"):
    """The condition that `count` different answers are known.

    `pattern`, here and below, is a regular expression (RE2 syntax) with one group, which is the answer. The last match
    in a sample's text counts; a sample without a match has no answer.
    """

    type: ClassVar[Literal["distinct"]] = "distinct"
    count: int
    pattern: str


class Majority(Wire, frozen=True, kw_only=True, tag_field="type", tag="majority"):
    """The condition that the most frequent answer has won the vote.

    It leads the next one by at least `margin`, or by more than the number of samples left.
    """

    type: ClassVar[Literal["majority"]] = "majority"
    margin: int
    pattern: str


class FirstMatch(Wire, frozen=True, kw_only=True, tag_field="type", tag="first_match"):
    """The condition that one sample has an answer."""

    type: ClassVar[Literal["first_match"]] = "first_match"
    pattern: str


StopWhen = Distinct | Majority | FirstMatch


class StopWhenResult(Wire, frozen=True, kw_only=True):
    """The votes of the samples.

    met        whether the condition was met, before or with the last finished sample
    answers    how often finished samples gave each answer, the most frequent first
    finished   samples that ended by themselves, including those that ended just after the condition was met
    unmatched  finished samples without an answer
    cancelled  samples that were ended early, with finish reason "stop_when" and their text so far
    """

    met: bool
    answers: dict[str, int]
    finished: int
    cancelled: int
    unmatched: int

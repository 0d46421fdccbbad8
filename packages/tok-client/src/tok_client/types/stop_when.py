"""stop_when: what has to be known of a prompt's samples for those that still run to be ended, and what came of it."""

from __future__ import annotations

from typing import ClassVar, Literal

from tok_client.types.base import Wire


class Distinct(Wire, frozen=True, kw_only=True, tag_field="type", tag="distinct"):
    """So many different answers are known.

    `pattern`, here and below: a regular expression (RE2's syntax) of one group, which is the answer. Of several matches
    in a sample's text the last counts; a sample without any has no answer.
    """

    type: ClassVar[Literal["distinct"]] = "distinct"
    count: int
    pattern: str


class Majority(Wire, frozen=True, kw_only=True, tag_field="type", tag="majority"):
    """The most frequent answer is `margin` ahead of the next one, or so far that no sample left can change it."""

    type: ClassVar[Literal["majority"]] = "majority"
    margin: int
    pattern: str


class FirstMatch(Wire, frozen=True, kw_only=True, tag_field="type", tag="first_match"):
    """A sample has an answer."""

    type: ClassVar[Literal["first_match"]] = "first_match"
    pattern: str


StopWhen = Distinct | Majority | FirstMatch


class StopWhenResult(Wire, frozen=True, kw_only=True):
    """What the samples said.

    met        the condition was, while samples finished or with the last of them
    answers    how often each was given by a finished sample, the most frequent first
    finished   samples that came to their own end, also in the moment after the condition was met; `unmatched` of them
               have no answer
    cancelled  samples that were ended, with finish reason "stop_when" and their text so far
    """

    met: bool
    answers: dict[str, int]
    finished: int
    cancelled: int
    unmatched: int

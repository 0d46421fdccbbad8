"""Describe the markup that the samples of a chat may hold beside content."""

from __future__ import annotations

from dataclasses import dataclass

from tok_server.parsing.formats import CallFormat


@dataclass(frozen=True, slots=True)
class Markup:
    """The markup that a sample's text may hold.

    calls      format of tool calls; None: they are not parsed
    tools      names of the tools that may be called
    parallel   there may be more than one call; otherwise calls after the first are dropped
    reasoning  think blocks are separated from content
    thinking   the prompt has opened the think block
    """

    calls: CallFormat | None = None
    tools: frozenset[str] = frozenset()
    parallel: bool = True
    reasoning: bool = False
    thinking: bool = False

    def __bool__(self) -> bool:
        return self.calls is not None or self.reasoning


NO_MARKUP = Markup()
"""All text is content."""

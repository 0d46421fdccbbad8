"""Markup: what the text of one chat's samples may hold beside content, so that it is told apart."""

from __future__ import annotations

from dataclasses import dataclass

from tok_server.parsing.formats import CallFormat


@dataclass(frozen=True, slots=True)
class Markup:
    """What markup a sample's text may hold.

    calls      how tool calls are written; None: they are not read
    tools      names of the tools that may be called
    parallel   there may be more than one call; otherwise those after the first are dropped
    reasoning  think blocks are told apart
    thinking   the prompt has opened the block
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

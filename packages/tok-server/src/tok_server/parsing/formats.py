"""Which format a model writes its tool calls in, and its reasoning: as told at the start, or as its template shows."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, Literal

import msgspec

from tok_server.parsing import hermes, llama3
from tok_server.parsing.call_parser import CallParser
from tok_server.parsing.hermes import HermesParser
from tok_server.parsing.llama3 import Llama3Parser
from tok_server.parsing.reasoning import CLOSE as THINK_CLOSE

if TYPE_CHECKING:
    from tok_core.text.template import ChatTemplate

CallFormat = Literal["hermes", "llama3"]
ToolCallParser = Literal["auto", "hermes", "llama3", "none"]
ReasoningParser = Literal["auto", "qwen3", "none"]


class Formats(msgspec.Struct, frozen=True):
    """What the server is told of its model's markup; auto: as the chat template shows."""

    tool_calls: ToolCallParser = "auto"
    reasoning: ReasoningParser = "auto"

    def calls_of(self, template: ChatTemplate) -> CallFormat | None:
        """How the model writes calls; None: they are not read."""
        if self.tool_calls != "auto":
            return None if self.tool_calls == "none" else self.tool_calls
        if template.mentions(hermes.OPEN):
            return "hermes"
        # Llama 3's templates name the role of tool results so, and the object of a call in their instructions.
        return "llama3" if template.mentions(llama3.TAG) or template.mentions("ipython") else None

    def reasons(self, template: ChatTemplate) -> bool:
        """Whether the model writes think blocks."""
        return self.reasoning == "qwen3" or (self.reasoning == "auto" and template.mentions(THINK_CLOSE))


def call_parser(kind: CallFormat, tools: Container[str]) -> CallParser:
    """A parser for one sample."""
    return HermesParser(tools) if kind == "hermes" else Llama3Parser(tools)

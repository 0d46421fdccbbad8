"""Determine the formats of tool calls and reasoning, from the settings or from the chat template."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, Literal

from tok_server.parsing import hermes, llama3
from tok_server.parsing.call_parser import CallParser
from tok_server.parsing.hermes import HermesParser
from tok_server.parsing.llama3 import Llama3Parser
from tok_server.parsing.reasoning import THINK_CLOSE
from tok_server.settings import Formats

if TYPE_CHECKING:
    from tok_core.text import ChatTemplate

CallFormat = Literal["hermes", "llama3"]


def tool_call_format(formats: Formats, template: ChatTemplate) -> CallFormat | None:
    """Return the format in which the model writes tool calls; None: they are not parsed."""
    if formats.tool_calls != "auto":
        return None if formats.tool_calls == "none" else formats.tool_calls
    if template.mentions(hermes.OPEN):
        return "hermes"
    # Llama 3's templates mention the tag before calls, or the role of tool results, "ipython".
    return "llama3" if template.mentions(llama3.TAG) or template.mentions("ipython") else None


def writes_reasoning(formats: Formats, template: ChatTemplate) -> bool:
    """Return whether the model writes think blocks."""
    return formats.reasoning == "qwen3" or (formats.reasoning == "auto" and template.mentions(THINK_CLOSE))


def call_parser(kind: CallFormat, tools: Container[str]) -> CallParser:
    """Return a parser for one sample."""
    return HermesParser(tools) if kind == "hermes" else Llama3Parser(tools)

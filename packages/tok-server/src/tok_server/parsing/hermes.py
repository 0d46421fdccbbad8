"""Parse calls of Hermes and Qwen models: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

from __future__ import annotations

from collections.abc import Container

from tok_server.parsing.call_parser import CallParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(CallParser):
    """Parser of Hermes calls. A call may begin anywhere; its closing mark may be missing, or come late."""

    def __init__(self, tools: Container[str]) -> None:
        super().__init__(tools)
        self._mark = ""  # part of a mark that has been read
        self._sought = OPEN

    def _outside(self, text: str, at: int) -> int:
        if self._mark:
            return self._in_mark(text[at], at)
        found = text.find("<", at)
        if found < 0:
            found = len(text)
        self._content(text[at:found])
        if found == len(text):
            return found
        self._mark = "<"
        return found + 1

    def _in_mark(self, character: str, at: int) -> int:
        mark = self._mark + character
        if self._sought.startswith(mark):
            self._mark = "" if mark == self._sought else mark
            if not self._mark:
                self._whole()
            return at + 1
        if self._sought == CLOSE and OPEN.startswith(mark):
            self._sought = OPEN  # the next call begins
        else:
            self._content(self._mark)
            self._mark = ""
        return at

    def _whole(self) -> None:
        """Handle a mark that has been read completely."""
        if self._sought == OPEN:
            self._held = [OPEN]
            self._begin()
        self._sought = OPEN

    def _ended(self) -> None:
        self._sought = CLOSE

    def _give_up(self) -> None:
        if self._sought == OPEN:
            self._held.append(self._mark)
        self._mark = ""
        super()._give_up()

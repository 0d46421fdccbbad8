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
        self._expected_mark = OPEN

    def _read_content(self, text: str, at: int) -> int:
        if self._mark:
            return self._read_mark(text[at], at)
        found = text.find("<", at)
        if found < 0:
            found = len(text)
        self._emit_content(text[at:found])
        if found == len(text):
            return found
        self._mark = "<"
        return found + 1

    def _read_mark(self, character: str, at: int) -> int:
        mark = self._mark + character
        if self._expected_mark.startswith(mark):
            self._mark = "" if mark == self._expected_mark else mark
            if not self._mark:
                self._mark_complete()
            return at + 1
        if self._expected_mark == CLOSE and OPEN.startswith(mark):
            self._expected_mark = OPEN  # the next call begins
        else:
            self._emit_content(self._mark)
            self._mark = ""
        return at

    def _mark_complete(self) -> None:
        """Handle a mark that has been read completely."""
        if self._expected_mark == OPEN:
            self._held_text = [OPEN]
            self._begin_call()
        self._expected_mark = OPEN

    def _call_ended(self) -> None:
        self._expected_mark = CLOSE

    def _abandon_call(self) -> None:
        if self._expected_mark == OPEN:
            self._held_text.append(self._mark)
        self._mark = ""
        super()._abandon_call()

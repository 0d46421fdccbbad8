"""Parse calls of Llama 3 models: `{"name": …, "parameters": {…}}` on a line, optionally after `<|python_tag|>`."""

from __future__ import annotations

import re
from collections.abc import Container

from tok_server.parsing.call_parser import CallParser

TAG = "<|python_tag|>"
_CONTENT_BREAK = re.compile(r"[\n<]")


class Llama3Parser(CallParser):
    """Parser of Llama 3 calls. A call may begin a line, or follow the tag or another call and a semicolon."""

    def __init__(self, tools: Container[str]) -> None:
        super().__init__(tools)
        self._mark = ""  # part of the tag that has been read
        self._gap: str | None = None  # white space and semicolons read since a call; None: not after a call
        self._at_start = True  # only white space has been read of the line

    def _read_content(self, text: str, at: int) -> int:
        if self._mark:
            return self._read_mark(text[at], at)
        character = text[at]
        if character == "<":
            self._mark = character
            return at + 1
        if character == "{" and (self._at_start or self._gap is not None):
            self._open_call()
            return at
        if self._gap is not None and (character.isspace() or character == ";"):
            self._gap += character
            return at + 1
        return self._read_text(text, at)

    def _read_text(self, text: str, at: int) -> int:
        if text[at].isspace():
            end = at + 1
            self._at_start = self._at_start or text[at] == "\n"
        else:
            line_break = _CONTENT_BREAK.search(text, at)
            end = line_break.start() if line_break else len(text)
            self._at_start = False
        self._emit_with_gap(text[at:end])
        return end

    def _read_mark(self, character: str, at: int) -> int:
        mark = self._mark + character
        if mark == TAG:
            self._mark = ""
            self._held_text.append(TAG)
            self._open_call()
            return at + 1
        if TAG.startswith(mark):
            self._mark = mark
            return at + 1
        self._at_start = False
        self._emit_with_gap(self._mark)
        self._mark = ""
        return at

    def _open_call(self) -> None:
        if self._gap is not None:
            self._held_text.insert(0, self._gap)
            self._gap = None
        self._begin_call()

    def _emit_with_gap(self, text: str) -> None:
        gap, self._gap = self._gap or "", None
        self._emit_content(gap + text)

    def _call_ended(self) -> None:
        self._gap = ""

    def _abandon_call(self) -> None:
        if self._mark:
            self._held_text = [self._gap or "", self._mark]
            self._mark = ""
        self._at_start = False
        super()._abandon_call()

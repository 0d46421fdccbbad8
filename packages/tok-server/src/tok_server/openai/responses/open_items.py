"""Build the items of a response while the model generates them, and the events that report them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from tok_client.types import (
    ChatTokenLogprob,
    ContentPartAdded,
    ContentPartDone,
    FunctionCallArgumentsDelta,
    FunctionCallArgumentsDone,
    FunctionCallItem,
    ItemStatus,
    OutputItem,
    OutputItemAdded,
    OutputItemDone,
    OutputMessage,
    OutputText,
    OutputTextDelta,
    OutputTextDone,
    ReasoningItem,
    ReasoningTextDelta,
    ReasoningTextDone,
    ReasoningTextPart,
    ResponseEvent,
)
from tok_server.wire import new_id

Logprobs = Sequence[ChatTokenLogprob]


class OpenItem(ABC):
    """The item number `index`, while it is generated. `sequence_numbers`: sequence numbers of events."""

    prefix: str

    def __init__(self, index: int, sequence_numbers: Iterator[int]) -> None:
        self.id = new_id(self.prefix, "_")
        self.index = index
        self._sequence_numbers = sequence_numbers
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """Return the text so far."""
        return "".join(self._texts)

    def start_events(self) -> list[ResponseEvent]:
        """Return the events that begin the item."""
        return [OutputItemAdded(item=self.item("in_progress", empty=True), **self._position())]

    def end_events(self, status: ItemStatus) -> list[ResponseEvent]:
        """Return the events that end the item."""
        return [OutputItemDone(item=self.item(status), **self._position())]

    @abstractmethod
    def item(self, status: ItemStatus, *, empty: bool = False) -> OutputItem:
        """Return the item so far; `empty`: without content."""

    @abstractmethod
    def append(self, text: str, logprobs: Logprobs) -> ResponseEvent:
        """Append `text`; return the event that reports it."""

    def _position(self) -> dict[str, Any]:
        """Return the members that every event about the item has."""
        return {"sequence_number": next(self._sequence_numbers), "output_index": self.index}

    def _inside(self) -> dict[str, Any]:
        """Return the members that every event about the item's content has."""
        return {"item_id": self.id, **self._position()}


class OpenPart(OpenItem):
    """An item whose content is a single part."""

    @abstractmethod
    def part(self, *, empty: bool = False) -> OutputText | ReasoningTextPart:
        """Return the part so far; `empty`: without text."""

    @abstractmethod
    def text_done(self) -> ResponseEvent:
        """Return the event that the text is complete."""

    def start_events(self) -> list[ResponseEvent]:
        return [*super().start_events(), ContentPartAdded(part=self.part(empty=True), **self._inside())]

    def end_events(self, status: ItemStatus) -> list[ResponseEvent]:
        return [self.text_done(), ContentPartDone(part=self.part(), **self._inside()), *super().end_events(status)]

    def _inside(self) -> dict[str, Any]:
        return {"content_index": 0, **super()._inside()}


class OpenMessage(OpenPart):
    """A message, while it is generated."""

    prefix = "msg"

    def __init__(self, index: int, sequence_numbers: Iterator[int]) -> None:
        super().__init__(index, sequence_numbers)
        self._logprobs: list[ChatTokenLogprob] = []

    def item(self, status: ItemStatus, *, empty: bool = False) -> OutputMessage:
        return OutputMessage(id=self.id, status=status, content=[] if empty else [self.part()])

    def part(self, *, empty: bool = False) -> OutputText:
        return OutputText(text="") if empty else OutputText(text=self.text, logprobs=self._logprobs)

    def append(self, text: str, logprobs: Logprobs) -> ResponseEvent:
        self._texts.append(text)
        self._logprobs += logprobs
        return OutputTextDelta(delta=text, logprobs=list(logprobs), **self._inside())

    def text_done(self) -> ResponseEvent:
        return OutputTextDone(text=self.text, logprobs=self._logprobs, **self._inside())


class OpenReasoning(OpenPart):
    """A reasoning item, while it is generated."""

    prefix = "rs"

    def item(self, status: ItemStatus, *, empty: bool = False) -> ReasoningItem:
        return ReasoningItem(id=self.id, status=status, content=[] if empty else [self.part()])

    def part(self, *, empty: bool = False) -> ReasoningTextPart:
        return ReasoningTextPart(text="" if empty else self.text)

    def append(self, text: str, logprobs: Logprobs) -> ResponseEvent:
        self._texts.append(text)
        return ReasoningTextDelta(delta=text, **self._inside())

    def text_done(self) -> ResponseEvent:
        return ReasoningTextDone(text=self.text, **self._inside())


class OpenFunctionCall(OpenItem):
    """A function call, while it is generated."""

    prefix = "fc"

    def __init__(self, index: int, sequence_numbers: Iterator[int], name: str) -> None:
        super().__init__(index, sequence_numbers)
        self._name = name
        self._call_id = new_id("call", "_")

    def item(self, status: ItemStatus, *, empty: bool = False) -> FunctionCallItem:
        arguments = "" if empty else self.text
        return FunctionCallItem(id=self.id, call_id=self._call_id, name=self._name, arguments=arguments, status=status)

    def append(self, text: str, logprobs: Logprobs) -> ResponseEvent:
        self._texts.append(text)
        return FunctionCallArgumentsDelta(delta=text, **self._inside())

    def end_events(self, status: ItemStatus) -> list[ResponseEvent]:
        done = FunctionCallArgumentsDone(name=self._name, arguments=self.text, **self._inside())
        return [done, *super().end_events(status)]

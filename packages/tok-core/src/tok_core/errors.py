"""Exceptions of this package, and how they are sent between processes.

TokError
├── InvalidField (ValueError)   one named field of a configuration or a request has a value that is not allowed
│   └── ContextLengthExceeded   prompt and answer together exceed the model's length
├── ModelError                  a model directory cannot be served: unknown architecture, missing or misshapen tensors
└── EngineError                 the engine cannot go on with a request
    ├── RequestFailed           the request cannot be computed, now or later; other requests are not affected
    ├── EngineDead              a process of the engine died while the request was open
    ├── EngineResumed           the engine was resumed while a pause or a sleep waited for requests to end
    └── EngineClosed            the engine was closed, or has not been started
"""

from __future__ import annotations

import copyreg


class TokError(Exception):
    """Base of all errors of this package. All of them can be pickled, if the values that they hold can be."""

    def __reduce__(self) -> tuple[object, ...]:
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class Amount(str):
    """How many parts a value has, in place of the value: "600 characters"."""


class InvalidField(TokError, ValueError):
    """A field has a value that is not allowed.

    field    name of the field
    value    its value, or an `Amount`
    allowed  the values allowed, in words
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        found = f"has {value}" if isinstance(value, Amount) else f"is {shown}"
        super().__init__(f"{field} {found}; allowed: {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed

    def renamed(self, field: str) -> InvalidField:
        """Return the same error about `field`, a caller's name for the field."""
        return InvalidField(field, self.value, self.allowed)


class ContextLengthExceeded(InvalidField):
    """Prompt and answer together exceed the model's length.

    max_model_len  the model's length in tokens
    value          `max_tokens` or `min_tokens`; for a prompt, its size
    """

    value: int | Amount

    def __init__(self, field: str, value: int | Amount, allowed: str, max_model_len: int) -> None:
        super().__init__(field, value, allowed)
        # Clients look for these words of OpenAI's API, to send the request to a model with a longer context.
        limit = f"This model's maximum context length is {max_model_len} tokens"
        self.args = (f"{self}. {limit}.",)
        self.max_model_len = max_model_len

    def renamed(self, field: str) -> ContextLengthExceeded:
        """Return the same error about `field`."""
        return ContextLengthExceeded(field, self.value, self.allowed, self.max_model_len)


class ModelError(TokError):
    """A model directory cannot be served; the message names the file, tensor or architecture."""


class EngineError(TokError):
    """The engine cannot go on with a request."""


class RequestFailed(EngineError):
    """The request cannot be computed, now or later. The engine goes on with other requests."""


class EngineDead(EngineError):
    """A process of the engine died while the request was open, or no replica serves.

    min_open_priority  the smallest `priority` of all requests that were open at the replica when it died, this one
                       included: any of them may have caused it; None: this request was not open then
    """

    def __init__(self, message: str, min_open_priority: int | None = None) -> None:
        super().__init__(message)
        self.min_open_priority = min_open_priority


class EngineResumed(EngineError):
    """The engine was resumed while a pause or a sleep waited for requests to end; it neither pauses nor sleeps."""


class EngineClosed(EngineError):
    """The engine was closed, or has not been started."""


Argument = str | int | float


def to_wire(error: BaseException) -> tuple[str, tuple[Argument, ...]]:
    """Return class name and arguments of an error, for `from_wire` to rebuild it in another process."""
    if isinstance(error, InvalidField):
        value = error.value if isinstance(error.value, str | int | float) else str(error.value)
        return "InvalidField", (error.field, value, error.allowed)
    if isinstance(error, TokError):
        return type(error).__name__, (str(error),)
    return "EngineError", (f"{type(error).__name__}: {error}",)


def from_wire(kind: str, arguments: tuple[Argument, ...]) -> TokError:
    """Return the error that `to_wire` described."""
    if kind == "InvalidField":
        field, value, allowed = arguments
        return InvalidField(str(field), value, str(allowed))
    kinds: dict[str, type[TokError]] = {
        one.__name__: one for one in (ModelError, EngineError, RequestFailed, EngineDead, EngineClosed)
    }
    return kinds.get(kind, EngineError)(*arguments)

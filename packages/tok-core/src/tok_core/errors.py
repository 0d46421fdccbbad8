"""What can go wrong, as exceptions.

TokError
├── InvalidField (ValueError)   one named field of a configuration or a request has a value that is not allowed
├── ModelError                  a model directory cannot be served: unknown architecture, missing or misshapen tensors
└── EngineError                 the engine cannot go on with a request
    ├── RequestFailed           the request cannot be computed, now or later; others are not concerned
    ├── EngineDead              a process of the engine died while the request was open
    └── EngineClosed            the engine was closed, or has not been started
"""

from __future__ import annotations


class TokError(Exception):
    """Base of all errors of this package."""


class InvalidField(TokError, ValueError):
    """`field` has `value`, which is not allowed; `allowed` says what is."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        super().__init__(f"{field} is {shown}; allowed: {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed


class ModelError(TokError):
    """A model directory that cannot be served; the message names the file, tensor or architecture."""


class EngineError(TokError):
    """The engine cannot go on with a request."""


class RequestFailed(EngineError):
    """The request cannot be computed, now or later. The engine goes on with others."""


class EngineDead(EngineError):
    """A process of the engine died while the request was open, or nothing serves.

    first_class  the smallest `priority` of the requests that were open when the replica died, this one among them:
                 any of them may be at fault; None where this one was not open
    """

    def __init__(self, message: str, first_class: int | None = None) -> None:
        super().__init__(message)
        self.first_class = first_class


class EngineClosed(EngineError):
    """The engine was closed, or has not been started."""


Argument = str | int | float


def to_wire(error: BaseException) -> tuple[str, tuple[Argument, ...]]:
    """Class name and arguments of an error, to be raised again in another process by `from_wire`."""
    if isinstance(error, InvalidField):
        value = error.value if isinstance(error.value, str | int | float) else str(error.value)
        return "InvalidField", (error.field, value, error.allowed)
    if isinstance(error, TokError):
        return type(error).__name__, (str(error),)
    return "EngineError", (f"{type(error).__name__}: {error}",)


def from_wire(kind: str, arguments: tuple[Argument, ...]) -> TokError:
    """The error that `to_wire` described."""
    if kind == "InvalidField":
        field, value, allowed = arguments
        return InvalidField(str(field), value, str(allowed))
    kinds: dict[str, type[TokError]] = {
        one.__name__: one for one in (ModelError, EngineError, RequestFailed, EngineDead, EngineClosed)
    }
    return kinds.get(kind, EngineError)(*arguments)

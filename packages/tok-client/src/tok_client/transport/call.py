"""One API request as a value, which both clients send in the same way."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")


class Call(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """A request to send, and the kind of answer to expect.

    path               below the base URL; with `at_root`, below the server's root: the base URL without its "/v1"
    kind               type of the answer, or of each chunk; `str` and `bytes` stand for the undecoded body
    body               JSON
    form               makes a form to send instead of `body`, a new one for each attempt
    accepted_statuses  error statuses whose body may be an answer of this kind
    default            answer to use if the body is empty
    final_types        chunk types that end a stream, which then needs no [DONE]; such a stream's chunks of unknown type
                       are dropped
    lenient            decodes an answer or chunk that does not match `kind`; raises MsgspecError. None: there is no
                       such decoder
    repeatable         whether sending the request twice is harmless. If not, it is retried only after a refusal by the
                       server
    """

    method: str
    path: str
    kind: type[T]
    body: bytes | None = None
    form: Callable[[], aiohttp.FormData] | None = None
    at_root: bool = False
    accepted_statuses: Collection[int] = ()
    default: T | None = None
    final_types: tuple[type, ...] = ()
    lenient: Callable[[bytes], T] | None = None
    repeatable: bool = True

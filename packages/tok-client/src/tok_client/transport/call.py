"""One request to the API as a value: both clients send the same ones."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")


class Call(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """What to send, and what kind of answer to expect.

    path        below the base URL; with `at_root`, below the server's root: the base URL without its "/v1"
    kind        the type of the answer, or of each chunk; `str` and `bytes` stand for the body as it is
    body        JSON
    form        makes a form to send instead of `body`, anew for each try
    also        error statuses that may come with an answer of this kind
    default     the answer where the body is empty
    ends        chunks of these types are the last of a stream, which then needs no [DONE]; of such streams, chunks of
                types that are not known are left out
    lenient     reads an answer or chunk that is no `kind` to the letter; None: nothing does. It raises MsgspecError
    repeatable  whether it does no harm when sent twice; if not, it is tried again only where the server refused it
    """

    method: str
    path: str
    kind: type[T]
    body: bytes | None = None
    form: Callable[[], aiohttp.FormData] | None = None
    at_root: bool = False
    also: Collection[int] = ()
    default: T | None = None
    ends: tuple[type, ...] = ()
    lenient: Callable[[bytes], T] | None = None
    repeatable: bool = True

"""Probe: whether the texts of a compiled grammar soon take a matcher much time or memory."""

from __future__ import annotations

import mmap
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import xgrammar

    from tok_core.grammar.compiler import Compiled

PROBE_BYTES: Final = 400
PROBE_SECONDS: Final = 0.25  # of a CPU; JSON of any kind takes 0.003, for a vocabulary of 128,256
PROBE_MEMORY: Final = 16 << 20
FILLERS: Final = (b"a", b" ", b"0", b'"', b"[", b"{", b"}", b"]", b",", b":", b"-", b".")


def too_wide(compiled: Compiled) -> bool:
    """Whether a text that repeats itself wherever it may takes more than the bounds above.

    Ambiguous grammars, and those of hundreds of overlapping alternatives, take time and memory that grow with the
    square of the text or faster; others take the same for each byte.
    """
    for fillers in (FILLERS, FILLERS[1:] + FILLERS[:1]):
        matcher = compiled.matcher()
        began, size, last = time.thread_time(), _resident(), b""
        for _ in range(PROBE_BYTES):
            last = _advance(matcher, (last, *fillers))
            if not last:
                break
            if time.thread_time() - began > PROBE_SECONDS or _resident() - size > PROBE_MEMORY:
                return True
    return False


def _advance(matcher: xgrammar.GrammarMatcher, fillers: tuple[bytes, ...]) -> bytes:
    """The byte that the matcher has accepted: one that has to come, or the first of the fillers that may."""
    try:
        settled = matcher.find_jump_forward_string().encode()
    except UnicodeDecodeError as error:
        settled = error.object
    for one in (settled[:1],) if settled else fillers:
        if one and matcher.accept_string(one):
            return one
    return b""


def _resident() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE

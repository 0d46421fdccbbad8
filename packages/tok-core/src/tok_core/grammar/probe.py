"""Probe whether following texts of a compiled grammar takes too much time or memory."""

from __future__ import annotations

import mmap
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import xgrammar

    from tok_core.grammar.compiler import Compiled

PROBE_BYTES: Final = 400  # length of the probe's text
PROBE_SECONDS: Final = 0.25  # CPU seconds; any JSON grammar takes 0.003 for a vocabulary of 128,256
PROBE_MEMORY: Final = 16 << 20  # bytes
FILLERS: Final = (b"a", b" ", b"0", b'"', b"[", b"{", b"}", b"]", b",", b":", b"-", b".")


def too_wide(compiled: Compiled) -> bool:
    """Return whether following a short, repetitive text exceeds PROBE_SECONDS or PROBE_MEMORY.

    The text repeats its last byte wherever the grammar allows it. Ambiguous grammars, and grammars with hundreds of
    overlapping alternatives, take time and memory that grow with the square of the text's length or faster. Other
    grammars take the same for each byte.
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
    """Advance the matcher by one byte and return it: the forced byte, or the first filler that the grammar allows."""
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

"""What stop strings mean, by the plain definition: join the bytes of all tokens and search."""

from __future__ import annotations

from collections.abc import Sequence

from tok_core.manager.stops import StopHit


def whole_text_search(pieces: Sequence[bytes], stops: Sequence[str], min_tokens: int = 0) -> StopHit | None:
    """The first to end of `stops` in a sample's `pieces`, and of those that end at once the longest.

    Those that end within the first `min_tokens` pieces do not count.
    """
    text = b"".join(pieces)
    ends = [len(b"".join(pieces[:count])) for count in range(len(pieces) + 1)]
    found: list[tuple[int, int, str]] = []
    for stop in stops:
        bytes_ = stop.encode()
        at = text.find(bytes_, max(0, ends[min(min_tokens, len(pieces))] - len(bytes_) + 1))
        if at >= 0:
            found.append((at + len(bytes_), at, stop))
    if not found:
        return None
    end, at, stop = min(found)
    return StopHit(stop, next(count for count, reached in enumerate(ends) if reached >= end), at)

"""Find stop strings by their definition: join the bytes of all tokens, or of shown tokens, and search."""

from __future__ import annotations

from collections.abc import Sequence

from tok_core.manager.stops import StopHit


def whole_text_search(
    pieces: Sequence[bytes], stops: Sequence[str], min_tokens: int = 0, shown: Sequence[bytes] | None = None
) -> tuple[int, StopHit] | None:
    """Return the hit of `stops` in a sample's `pieces` that ends first, and the number of pieces up to its end.

    Among equal ends, the hit that begins first counts.

    Hits that end within the first `min_tokens` pieces do not count. `shown` has the shown bytes of each piece: all or
    none.
    """
    ends = [len(b"".join(pieces[:count])) for count in range(len(pieces) + 1)]
    every = list(range(ends[-1]))
    visible = [at for place, piece in enumerate(shown or ()) for at in range(ends[place], ends[place] + len(piece))]
    found: list[tuple[int, int, str]] = []
    for parts, places in ((pieces, every), (shown or (), visible)):
        text, begun = b"".join(parts), len(b"".join(parts[:min_tokens]))
        for stop in stops:
            bytes_ = stop.encode()
            at = text.find(bytes_, max(0, begun - len(bytes_) + 1))
            if at >= 0:
                found.append((places[at + len(bytes_) - 1] + 1, places[at], stop))
    if not found:
        return None
    end, at, stop = min(found)
    return next(count for count, reached in enumerate(ends) if reached >= end), StopHit(stop, at)

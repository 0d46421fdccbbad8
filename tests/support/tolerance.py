"""Compare JSON answers of two runs, whose floats differ in the last bits with the rest of the batch."""

from __future__ import annotations

import math


def near(found: object, wanted: object, within: float = 1e-3) -> bool:
    """Return whether both are the same JSON, except for floats at most `within` apart."""
    match found, wanted:
        case dict(), dict():
            return found.keys() == wanted.keys() and all(near(found[name], wanted[name], within) for name in found)
        case list(), list():
            return len(found) == len(wanted) and all(near(*pair, within) for pair in zip(found, wanted, strict=True))
        case float(), float():
            return found == wanted or math.isclose(found, wanted, rel_tol=0, abs_tol=within)
        case _:
            return type(found) is type(wanted) and found == wanted

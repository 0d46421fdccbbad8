"""Write the decimal notations of the numbers in a range as regular expressions.

A range is split by number of digits, then digit by digit: the first digit lies between the first digits of both ends.
Where it equals one of these, the remaining digits are bounded likewise.

    23 to 47:  2[3-9] | 3[0-9] | 4[0-7]

Numbers have at most 15 significant digits and integers 18, so that no two are equal when read as 64-bit numbers.
"""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Final, NamedTuple

from tok_core.grammar.regex import NOTHING, Unsatisfiable, Unsupported, either, literal, maybe, repeat, sequence

INTEGER_DIGITS: Final = 18  # of an integer
DIGITS: Final = 15  # significant digits of a number
MAX_FRACTION_DIGITS: Final = 6
MAX_MULTIPLES: Final = 1000
_DIGIT: Final = "[0-9]"
_MINUS, _POINT = literal("-"), literal(".")


class Bounds(NamedTuple):
    """Bounds of a number, inclusive unless `above` (for `low`) or `below` (for `high`) is set; None: unbounded."""

    low: Decimal | None = None
    high: Decimal | None = None
    above: bool = False
    below: bool = False

    @property
    def any(self) -> bool:
        """Return whether nothing is excluded."""
        return self.low is None and self.high is None


def integer(bounds: Bounds, multiple: int) -> str:
    """Return the expression for the multiples of `multiple` within `bounds`.

    Raise Unsupported if there are none or too many.
    """
    if bounds.any and multiple == 1:
        return sequence(maybe(_MINUS), _whole(INTEGER_DIGITS))
    low, high = _scaled(bounds, 0, 10**INTEGER_DIGITS - 1)
    if multiple == 1:
        return _some(_range(low, high, 0))
    first, last = -(-low // multiple), high // multiple
    if last - first >= MAX_MULTIPLES:
        raise Unsupported(f"multipleOf with at most {MAX_MULTIPLES} multiples from minimum to maximum")
    return _some([literal(str(multiple * times)) for times in range(first, last + 1)])


def number(bounds: Bounds) -> str:
    """Return the expression for numbers within `bounds`, with or without fraction. Raise Unsupported if none exists."""
    if bounds.any:
        fraction = maybe(sequence(_POINT, repeat(_DIGIT, 1, DIGITS)))
        exponent = maybe(sequence("[eE]", maybe("[\\x2b\\x2d]"), repeat(_DIGIT, 1, 2)))
        return sequence(maybe(_MINUS), _whole(DIGITS), fraction, exponent)
    places = len(str(max(abs(int(end)) for end in (bounds.low, bounds.high) if end is not None)))
    if places > DIGITS:
        raise Unsupported(f"bounds of at most {DIGITS} digits")
    most = min(MAX_FRACTION_DIGITS, DIGITS - places)
    found = []
    for digits in range(most + 1):
        found += _range(*_scaled(bounds, digits, 10 ** (DIGITS - most + digits) - 1), digits)
    return _some(found)


def decimal(value: object) -> Decimal | None:
    """Return a finite JSON number as the decimal that its shortest notation denotes; None for other values."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return Decimal(repr(value))


def _whole(digits: int) -> str:
    return either(["0", sequence("[1-9]", repeat(_DIGIT, 0, digits - 1))])


def _scaled(bounds: Bounds, digits: int, most: int) -> tuple[int, int]:
    """Return the least and the greatest integer n, |n| ≤ `most`, for which n / 10 ** `digits` lies within `bounds`."""
    low, high = -most, most
    if bounds.low is not None:
        scaled = bounds.low.scaleb(digits)
        low = max(low, int(scaled.to_integral_value(ROUND_CEILING)))
        low += bounds.above and low == scaled
    if bounds.high is not None:
        scaled = bounds.high.scaleb(digits)
        high = min(high, int(scaled.to_integral_value(ROUND_FLOOR)))
        high -= bounds.below and high == scaled
    return low, high


def _range(low: int, high: int, fraction: int) -> list[str]:
    """Return expressions that together match the integers from `low` to `high`.

    A point stands before the last `fraction` digits. With `fraction` 2, the integer 150 is written 1.50.
    """
    found = []
    if low < 0:
        found += [sequence(_MINUS, one) for one in _natural(max(1, -high), -low, fraction)]
    return found + (_natural(max(0, low), high, fraction) if high >= 0 else [])


def _natural(low: int, high: int, fraction: int) -> list[str]:
    found = []
    for size in range(max(len(str(low)), fraction + 1), max(len(str(high)), fraction + 1) + 1):
        least = 0 if size == fraction + 1 else 10 ** (size - 1)
        first, last = max(low, least), min(high, 10**size - 1)
        if first <= last:
            found.append(_between(f"{first:0{size}}", f"{last:0{size}}", fraction))
    return found


def _between(low: str, high: str, fraction: int) -> str:
    """Return the expression for the digits from `low` to `high`, which have equal length.

    A point stands before the last `fraction` digits.
    """
    size = len(low)
    point = _POINT if fraction and size == fraction else NOTHING
    if not size:
        return NOTHING
    if set(low) == {"0"} and set(high) == {"9"}:
        return sequence(point, _digits(size, fraction))
    if low[0] == high[0]:
        return sequence(point, low[0], _between(low[1:], high[1:], fraction))
    zeros, nines = "0" * (size - 1), "9" * (size - 1)
    first, last = int(low[0]) + 1, int(high[0]) - 1
    parts = [
        sequence(low[0], _between(low[1:], nines, fraction)),
        sequence(high[0], _between(zeros, high[1:], fraction)),
    ]
    if first <= last:
        parts.append(sequence(f"[{first}-{last}]", _between(zeros, nines, fraction)))
    return sequence(point, either(parts))


def _digits(size: int, fraction: int) -> str:
    """Return the expression for `size` digits, a point before the last `fraction` ones.

    If `size` is at most `fraction`, the point is already written.
    """
    if not fraction or size <= fraction:
        return repeat(_DIGIT, size, size)
    return sequence(repeat(_DIGIT, size - fraction, size - fraction), _POINT, repeat(_DIGIT, fraction, fraction))


def _some(options: list[str]) -> str:
    if not options:
        raise Unsatisfiable("bounds that some number lies within")
    return either(options)

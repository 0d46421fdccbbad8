"""Bare arithmetic of one or two operations, and the numbers of all problems of one step."""

from __future__ import annotations

from demo_training.problem import ProblemSampler, WordProblem

_ASKED = (
    "[What is|What's|Calculate|How much is|Compute|Solve|Please compute|what is|Can you compute|Evaluate|Work out|] {}"
)
_WORDS = {
    "+": ("plus", "What is the sum of {} and {}?", "[Add {0} and {1}.|What is {0} added to {1}?]"),
    "-": ("minus", "What is the difference between {} and {}?", "What is left if you take {1} [away |]from {0}?"),
    "*": ("times", "What is the product of {} and {}?", "Multiply {} [by|and] {}."),
    "/": ("divided by", "What do you get if you divide {} by {}?", "Divide {} by {}."),
}
_SIGNS = {"+": "+", "-": "-", "*": "[*|*|*|*|x|×]", "/": "[/|/|/|/|÷|:]"}


def operands(draw: ProblemSampler, sign: str) -> tuple[int, int]:
    """Return two numbers that the operation gives an integer of, not below zero. Most are small."""
    level = draw.number(0, 9)
    if sign in "+-":
        highest = 20 if level < 5 else 100 if level < 8 else 999
        first, second = draw.number(1, highest), draw.number(1, highest)
        return (first, second) if sign == "+" else (max(first, second), min(first, second))
    small = draw.number(2, 12)
    other = draw.number(1, 12) if level < 7 else draw.number(10, 100)
    if sign == "/":
        return small * other, small
    return (small, other) if draw.happens(0.5) else (max(2, other), small)


def solved(left: int, sign: str, right: int) -> tuple[str, int]:
    """Return the equation and its result: ("3 + 4 = 7", 7)."""
    result = {"+": left + right, "-": left - right, "*": left * right, "/": left // right}[sign]
    return f"{left} {sign} {right} = {result}", result


def arithmetic(draw: ProblemSampler) -> WordProblem:
    """Return a question such as `What is 12 * 7?`; one in six has two operations."""
    if draw.happens(1 / 6):
        return _two_operations(draw)
    sign = draw.pick("+-*/")
    a, b = operands(draw, sign)
    if sign == "-" and draw.happens(0.1):
        a, b = b, a
    equation, result = solved(a, sign, b)
    word, *sentences = _WORDS[sign]
    if draw.happens(0.15):
        return WordProblem(draw.phrase(draw.pick(sentences).format(a, b)), (equation,), result)
    spaced = f" {word} " if draw.happens(0.15) else draw.phrase(draw.pick((f" {_SIGNS[sign]} ", f" {sign} ", sign)))
    return WordProblem(_asked(draw, f"{a}{spaced}{b}"), (equation,), result)


def _two_operations(draw: ProblemSampler) -> WordProblem:
    """Return a sum or difference with a product, or of three numbers, with or without parentheses."""
    a, b, c = draw.number(2, 12), draw.number(2, 12), draw.number(1, 30)
    form = draw.number(0, 4)
    if form == 0:
        shown, (first, one), sign = f"{c} + {a} * {b}", solved(a, "*", b), "+"
        second, two = solved(c, sign, one)
    elif form == 1:
        shown, (first, one) = f"{a} * {b} + {c}", solved(a, "*", b)
        second, two = solved(one, "+", c)
    elif form == 2:
        c = min(c, a * b)
        shown, (first, one) = f"{a} * {b} - {c}", solved(a, "*", b)
        second, two = solved(one, "-", c)
    elif form == 3:
        shown, (first, one) = f"({c} + {b}) * {a}", solved(c, "+", b)
        second, two = solved(one, "*", a)
    else:
        shown, (first, one) = f"{c} + {a} + {b}", solved(c, "+", a)
        second, two = solved(one, "+", b)
    return WordProblem(_asked(draw, shown), (first, second), two)


def _asked(draw: ProblemSampler, shown: str) -> str:
    if draw.happens(0.15):
        return f"{shown} ="
    question = draw.phrase(_ASKED).format(shown).strip()
    ending = draw.pick(("?", "?", "?", "", ".")) if question != shown else draw.pick(("", "?", " = ?"))
    return question + ending

"""Problems of one step, in many phrasings.

one_step.txt has a question and the sentence that answers it in each line, below a heading with the operation. `[a|b]`
is a choice, and `<in_all>` an abbreviation. Placeholders are filled by `_words`: `{a_things}` is "3 apples",
`{equation}` is "3 + 4 = 7".
"""

from __future__ import annotations

import re
from pathlib import Path

from demo_training.problem import ProblemSampler, WordProblem
from demo_training.templates.arithmetic import operands, solved
from demo_training.words import ANIMALS, COLORS, CONTAINERS, GROUPS, NUMBER_WORDS, RELATIVES, VEHICLES, Noun

_UNITS = ("miles", "kilometers", "km", "meters")


def _phrasings(text: str) -> dict[str, list[tuple[str, str]]]:
    """Return pairs of question and answer by operation."""
    meanings: dict[str, str] = {}
    found: dict[str, list[tuple[str, str]]] = {}
    for line in filter(None, text.splitlines()):
        whole = re.sub("<[a-z_]+>(?!:)", lambda short: meanings[short[0]], line)
        if line.startswith("# "):
            found[line[2:]] = rows = []
        elif " => " in line:
            question, _, answer = whole.partition(" => ")
            rows.append((question, answer))
        else:
            short, _, meaning = whole.partition(": ")
            meanings[short] = meaning
    return found


_PHRASINGS = _phrasings(Path(__file__).with_suffix(".txt").read_text(encoding="utf-8"))


def one_step(draw: ProblemSampler) -> WordProblem:
    """Return a problem of one step."""
    sign = draw.pick("+-*/")
    question, sentence = draw.pick(_PHRASINGS[sign])
    a, b = operands(draw, sign)
    equation, answer = solved(a, sign, b)
    words = _words(draw, a, b) | {"equation": equation}
    return WordProblem(_typed(draw, draw.phrase(question.format_map(words))), (sentence.format_map(words),), answer)


def _words(draw: ProblemSampler, a: int, b: int) -> dict[str, str]:
    (first, second), (thing, other_thing) = draw.pair(), (draw.noun(), draw.noun())
    container, group, animal = draw.pick(CONTAINERS), draw.pick(GROUPS), draw.pick(ANIMALS)
    color, shade = draw.two(COLORS)
    spelled = draw.happens(0.05)
    return {
        "name": first.name, "they": first.they, "They": first.they.capitalize(), "their": first.their,
        "Their": first.their.capitalize(), "them": first.them, "other": second.name, "relative": draw.pick(RELATIVES),
        "thing": thing.one, "things": thing.many, "noun": other_thing.one, "b_nouns": _counted(b, other_thing, spelled),
        "container": container.one,
        "containers": container.many, "person": group.one, "people": group.many, "adults": draw.pick(GROUPS).many,
        "animals": animal.many, "color": color, "shade": shade, "vehicle": draw.pick(VEHICLES),
        "unit": draw.pick(_UNITS), "a": _number(a, spelled), "b": _number(b, spelled),
        "a_things": _counted(a, thing, spelled), "b_things": _counted(b, thing, spelled),
    }  # fmt: skip


def _number(number: int, spelled: bool) -> str:
    return NUMBER_WORDS[number] if spelled and number < len(NUMBER_WORDS) else str(number)


def _counted(number: int, thing: Noun, spelled: bool) -> str:
    return f"{_number(number, spelled)} {thing.one if number == 1 else thing.many}"


def _typed(draw: ProblemSampler, question: str) -> str:
    """Return the question with the first letter in upper case, or sometimes as people type in a hurry."""
    question = question[0].upper() + question[1:]
    if draw.happens(0.5):
        question = question.replace(" 2 times as many", " twice as many")
    if draw.happens(0.04):
        question = question.lower()
    return question.rstrip("?.") if draw.happens(0.04) else question

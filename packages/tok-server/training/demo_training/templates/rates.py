"""Problems about rates: per hour, per day, per year, per batch."""

from __future__ import annotations

from demo_training.problem import ProblemSampler, WordProblem
from demo_training.words import TREATS, VEHICLES


def travelling(draw: ProblemSampler) -> WordProblem:
    """Return a problem about two legs at two speeds: the distance, or the rest of a longer trip."""
    what, hours, more = draw.pick(VEHICLES), draw.amount(3, 14), draw.amount(3, 14)
    speed, slower = draw.amount(30, 85), draw.amount(20, 70)
    first, second = hours * speed, more * slower
    total = first + second
    steps: tuple[str, ...] = (
        f"In the first part the {what} goes {hours} * {speed} = {first} miles.",
        f"In the second part it goes {more} * {slower} = {second} miles.",
        f"Together that is {first} + {second} = {total} miles.",
    )
    drive = f"A {what} goes {speed} miles an hour for {hours} hours and then {slower} miles an hour for {more} hours."
    if draw.number(0, 1):
        return WordProblem(f"{drive} How many miles does it go in all?", steps, total)
    rest = draw.amount(10, 200)
    steps += (f"So {total + rest} - {total} = {rest} miles are left.",)
    return WordProblem(f"{drive} The whole trip is {total + rest} miles long. How many miles are left?", steps, rest)


def ages(draw: ProblemSampler) -> WordProblem:
    """Return a problem about ages by comparison, now and in some years."""
    (a, b), age, older, times = draw.pair(), draw.number(3, 14), draw.number(2, 12), draw.number(2, 4)
    later = draw.number(3, 25)
    kin = draw.pick(("aunt", "coach", "neighbor", "teacher", "uncle"))
    second = age + older
    third = second * times
    return WordProblem(
        f"{a.name} is {age} years old. {b.name} is {older} years older than {a.name}, and {b.their} {kin} is {times} "
        f"times as old as {b.name}. How old will the {kin} be in {later} years?", (
            f"{b.name} is {age} + {older} = {second} years old.",
            f"The {kin} is {second} * {times} = {third} years old.",
            f"In {later} years the {kin} will be {third} + {later} = {third + later} years old.",
        ), third + later)  # fmt: skip


def baking(draw: ProblemSampler) -> WordProblem:
    """Return a problem about trays of treats: some are eaten, the rest are packed into boxes."""
    who, treat, trays, each = draw.person(), draw.pick(TREATS), draw.few(), draw.amount(12, 64) + 2
    size = draw.number(2, min(9, trays * each // 4))
    total = trays * each
    eaten = total % size + size * draw.number(1, 2)
    boxes = (total - eaten) // size
    gone = draw.pick((f"{who.their.capitalize()} family eats", "The children eat", "The neighbors take"))
    return WordProblem(
        f"{who.name} bakes {trays} trays of {each} {treat}. {gone} {eaten} of them, and the rest are packed into "
        f"boxes of {size}. How many boxes are there?", (
            f"{who.name} bakes {trays} * {each} = {total} {treat}.",
            f"Then {total} - {eaten} = {total - eaten} {treat} are left.",
            f"They fill {total - eaten} / {size} = {boxes} boxes.",
        ), boxes)  # fmt: skip


def reading(draw: ProblemSampler) -> WordProblem:
    """Return a problem about a book read at one pace, then at another."""
    who, days, daily = draw.person(), draw.few(), draw.some()
    pace, more = draw.amount(8, 48), draw.amount(3, 19)
    read, rest = days * daily, pace * more
    pages = read + rest
    return WordProblem(
        f"{who.name} reads a book of {pages} pages. For {days} days {who.they} reads {daily} pages a day, then {pace} "
        f"pages a day. How many more days does {who.they} need to finish the book?", (
            f"In {days} days {who.name} reads {days} * {daily} = {read} pages.",
            f"There are {pages} - {read} = {rest} pages left.",
            f"That takes {rest} / {pace} = {more} more days.",
        ), more)  # fmt: skip


def tank(draw: ProblemSampler) -> WordProblem:
    """Return a problem about water that flows out by the hour and is filled up again."""
    hours, flow, added = draw.few(), draw.amount(8, 64), draw.some()
    out = hours * flow
    start = out + draw.many()
    what = draw.pick(("barrel", "pool", "tank", "tub"))
    left = start - out
    return WordProblem(
        f"A {what} holds {start} liters of water. It loses {flow} liters an hour for {hours} hours. Then {added} "
        f"liters are poured in. How many liters are in the {what} now?", (
            f"The {what} loses {hours} * {flow} = {out} liters.",
            f"So {start} - {out} = {left} liters are left.",
            f"Now there are {left} + {added} = {left + added} liters in it.",
        ), left + added)  # fmt: skip

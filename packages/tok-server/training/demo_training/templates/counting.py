"""Problems about counts: groups, shares, comparisons."""

from __future__ import annotations

from demo_training.problem import ProblemSampler, WordProblem
from demo_training.words import PLACES, PLANTS


def sharing(draw: ProblemSampler) -> WordProblem:
    """Return a problem in which some things arrive, some go, and the rest is shared equally."""
    who, thing, friends = draw.person(), draw.thing(), draw.number(2, 9)
    each, gone = draw.amount(12, 80), draw.some()
    start = draw.number(2, each * friends)
    more = each * friends + gone - start
    total = start + more
    lost = draw.pick(("loses", "gives away", "sells"))
    return WordProblem(
        f"{who.name} has {start} {thing} and gets {more} more. Then {who.they} {lost} {gone} of them and shares "
        f"the rest equally among {friends} friends. How many {thing} does each friend get?", (
            f"At first there are {start} + {more} = {total} {thing}.",
            f"After that {total} - {gone} = {total - gone} {thing} remain.",
            f"Each friend gets {total - gone} / {friends} = {each} {thing}.",
        ), each)  # fmt: skip


def collections(draw: ProblemSampler) -> WordProblem:
    """Return a problem in which one person has several times as many things as another, and a third has fewer."""
    (a, b), third, thing = draw.pair(), draw.pick(("brother", "cousin", "friend", "sister")), draw.thing()
    n, times = draw.some() + 2, draw.amount(2, 12)
    fewer = draw.number(1, n - 2)
    second = n * times
    last = second - fewer
    steps: tuple[str, ...] = (
        f"{b.name} has {n} * {times} = {second} {thing}.",
        f"The {third} has {second} - {fewer} = {last} {thing}.",
    )
    facts = (
        f"{a.name} has {n} {thing}. {b.name} has {times} times as many as {a.name}, and {b.their} {third} has "
        f"{fewer} fewer than {b.name}."
    )
    if draw.number(0, 1):
        return WordProblem(f"{facts} How many {thing} does the {third} have?", steps, last)
    steps += (f"{a.name} and {b.name} have {n} + {second} = {n + second} {thing}.",
              f"All three have {n + second} + {last} = {n + second + last} {thing}.")  # fmt: skip
    return WordProblem(f"{facts} How many {thing} do all three have together?", steps, n + second + last)


def garden(draw: ProblemSampler) -> WordProblem:
    """Return a problem about rows of plants, some of which do not grow, and a few more."""
    who, plant = draw.person(), draw.pick(PLANTS)
    rows, each, more = draw.few(), draw.some(), draw.some()
    planted = rows * each
    lost = draw.number(2, planted // 2)
    cause = draw.pick(("are eaten by birds", "do not grow", "dry out", "are picked"))
    return WordProblem(
        f"{who.name} plants {rows} rows of {each} {plant}. {lost} of them {cause}, so {who.they} plants {more} "
        f"more. How many {plant} are there now?", (
            f"At first there are {rows} * {each} = {planted} {plant}.",
            f"Then {planted} - {lost} = {planted - lost} are left.",
            f"Now there are {planted - lost} + {more} = {planted - lost + more} {plant}.",
        ), planted - lost + more)  # fmt: skip


def classroom(draw: ProblemSampler) -> WordProblem:
    """Return a problem about a trip that every pupil pays for, and the bus."""
    boys, girls, price, bus = draw.amount(8, 48), draw.amount(8, 48), draw.amount(6, 29), draw.many()
    place = draw.pick(PLACES)
    pupils = boys + girls
    entry = pupils * price
    return WordProblem(
        f"{boys} boys and {girls} girls go on a trip to the {place}. Each of them pays {price} dollars, and the bus "
        f"costs {bus} dollars more. What does the trip cost altogether?", (
            f"There are {boys} + {girls} = {pupils} children.",
            f"They pay {pupils} * {price} = {entry} dollars.",
            f"With the bus the trip costs {entry} + {bus} = {entry + bus} dollars.",
        ), entry + bus)  # fmt: skip


def farm(draw: ProblemSampler) -> WordProblem:
    """Return a problem about the eggs of some days, packed into boxes after some are kept."""
    who, hens, eggs, days = draw.person(), draw.few(), draw.number(2, 6), draw.number(2, 9)
    daily = hens * eggs
    total = daily * days
    size = draw.pick([size for size in (2, 3, 4, 6, 8, 10, 12) if 3 * size <= total])
    kept = total % size + size * draw.number(0, max(0, total // size - 3))
    kept += size if kept < 2 else 0
    boxes = (total - kept) // size
    return WordProblem(
        f"{who.name} has {hens} hens, and each lays {eggs} eggs a day. After {days} days {who.they} keeps {kept} eggs "
        f"and packs the rest into boxes of {size}. How many boxes does {who.they} fill?", (
            f"The hens lay {hens} * {eggs} = {daily} eggs a day.",
            f"In {days} days that is {daily} * {days} = {total} eggs.",
            f"Without the kept ones there are {total} - {kept} = {total - kept} eggs.",
            f"They fill {total - kept} / {size} = {boxes} boxes.",
        ), boxes)  # fmt: skip


def parking(draw: ProblemSampler) -> WordProblem:
    """Return a problem about free places after arrivals and departures."""
    levels, each, came = draw.amount(4, 19), draw.some() + 2, draw.amount(40, 190)
    places = levels * each
    left = draw.number(2, came - 2)
    came = min(came, places - 2)
    left = min(left, came - 1)
    parked = came - left
    return WordProblem(
        f"A parking garage has {levels} levels with {each} places each. In the morning {came} cars come in, and {left} "
        f"of them leave by noon. How many places are free at noon?", (
            f"The garage has {levels} * {each} = {places} places.",
            f"At noon {came} - {left} = {parked} cars are inside.",
            f"So {places} - {parked} = {places - parked} places are free.",
        ), places - parked)  # fmt: skip

"""Problems about money: prices, wages, savings."""

from __future__ import annotations

from demo_training.problem import ProblemSampler, WordProblem
from demo_training.words import JOBS, PLACES, WANTED


def shopping(draw: ProblemSampler) -> WordProblem:
    """Return a problem about two purchases: the cost of both, or the change."""
    who, (a, b) = draw.person(), draw.two(("books", "bags", "caps", "cups", "lamps", "pens", "shirts", "toys"))
    n, m, price, other = draw.few(), draw.few(), draw.some(), draw.amount(6, 49)
    first, second = n * price, m * other
    total = first + second
    steps: tuple[str, ...] = (
        f"The {a} cost {n} * {price} = {first} dollars.",
        f"The {b} cost {m} * {other} = {second} dollars.",
        f"Together they cost {first} + {second} = {total} dollars.",
    )
    bought = f"{who.name} buys {n} {a} for {price} dollars each and {m} {b} for {other} dollars each."
    if draw.number(0, 1):
        ask = draw.pick((f"How much does {who.they} spend in all?", "How many dollars is that in total?"))
        return WordProblem(f"{bought} {ask}", steps, total)
    change = draw.amount(5, 90)
    paid = total + change
    steps += (f"The change is {paid} - {total} = {change} dollars.",)
    return WordProblem(f"{bought} {who.they.capitalize()} pays with {paid} dollars. "
                   f"How much change does {who.they} get?", steps, change)  # fmt: skip


def saving(draw: ProblemSampler) -> WordProblem:
    """Return a problem about weekly savings, money saved before, and one purchase."""
    who, item = draw.person(), draw.pick(WANTED)
    start, weekly, weeks = draw.some(), draw.some(), draw.few()
    saved = weekly * weeks
    total = start + saved
    cost = draw.number(2, total - 2)
    had = draw.pick((f"{who.name} has {start} dollars", f"There are {start} dollars in {who.name}'s money box"))
    question = (
        f"{had} and saves {weekly} dollars a week for {weeks} weeks. Then {who.they} buys a {item} for {cost} "
        f"dollars. How many dollars are left?"
    ).replace("money box and saves", f"money box, and {who.they} saves")
    return WordProblem(question, (
        f"In {weeks} weeks {who.name} saves {weekly} * {weeks} = {saved} dollars.",
        f"Now {who.they} has {start} + {saved} = {total} dollars.",
        f"After buying the {item}, {total} - {cost} = {total - cost} dollars are left.",
    ), total - cost)  # fmt: skip


def earning(draw: ProblemSampler) -> WordProblem:
    """Return a problem about hours a day, days, an hourly wage and a bonus."""
    who, where = draw.person(), draw.pick(JOBS)
    hours, days, wage, bonus = draw.number(2, 9), draw.amount(3, 18), draw.amount(9, 38), draw.some()
    worked = hours * days
    pay = worked * wage
    extra = draw.pick((f"a bonus of {bonus} dollars", f"{bonus} dollars in tips"))
    return WordProblem(
        f"{who.name} works at {where} for {hours} hours a day and earns {wage} dollars an hour. "
        f"After {days} days {who.they} also gets {extra}. How much does {who.they} earn in all?", (
            f"{who.name} works {hours} * {days} = {worked} hours.",
            f"The pay is {worked} * {wage} = {pay} dollars.",
            f"In all {who.they} earns {pay} + {bonus} = {pay + bonus} dollars.",
        ), pay + bonus)  # fmt: skip


def halving(draw: ProblemSampler) -> WordProblem:
    """Return a problem in which half of the money is spent, then a few things are bought from the rest."""
    who, thing = draw.person(), draw.thing()
    n, price = draw.few(), draw.amount(6, 48)
    cost = n * price
    half = cost + draw.amount(5, 150)
    spent = draw.pick(("spends half of it on food", "gives half of it away", "lends half of it to a friend"))
    return WordProblem(
        f"{who.name} has {2 * half} dollars. {who.they.capitalize()} {spent}. From the rest {who.they} buys "
        f"{n} {thing} for {price} dollars each. How much money does {who.they} have left?", (
            f"After the first half {2 * half} / 2 = {half} dollars are left.",
            f"The {thing} cost {n} * {price} = {cost} dollars.",
            f"So {half} - {cost} = {half - cost} dollars are left.",
        ), half - cost)  # fmt: skip


def tickets(draw: ProblemSampler) -> WordProblem:
    """Return a problem about tickets of two prices, sold on one day."""
    place, a, b = draw.pick(PLACES), draw.some(), draw.some()
    adult = draw.amount(8, 36) + 2
    child = draw.number(2, adult - 1)
    first, second = a * adult, b * child
    ask, words, answer = draw.pick((
        ("How much money does the {} take in?", "Together that is {} + {} = {} dollars.", first + second),
        ("How much more do the adults pay than the children?", "The difference is {} - {} = {} dollars.",
         first - second),
    ))  # fmt: skip
    if answer <= 0:
        a, b, first, second = b, a, b * adult, a * child
        answer = first - second
    return WordProblem(
        f"A ticket to the {place} costs {adult} dollars for an adult and {child} dollars for a child. One day "
        f"{a} adults and {b} children come. {ask.format(place)}", (
            f"The adults pay {a} * {adult} = {first} dollars.",
            f"The children pay {b} * {child} = {second} dollars.",
            words.format(first, second, answer),
        ), answer)  # fmt: skip

"""Words that fill the templates."""

from __future__ import annotations

from typing import NamedTuple


class Person(NamedTuple):
    """A name and its pronouns, as in "he" and "his"."""

    name: str
    they: str
    their: str


_WOMEN = (
    "Anna", "Bella", "Clara", "Dora", "Emma", "Fatima", "Grace", "Hana", "Ida", "Julia", "Kim", "Lena",
    "Maria", "Nina", "Olga", "Priya", "Rosa", "Sara", "Tina", "Zoe",
)  # fmt: skip
_MEN = (
    "Adam", "Ben", "Carlos", "David", "Eric", "Felix", "George", "Hugo", "Ivan", "Jack", "Karl", "Leo",
    "Marco", "Noah", "Omar", "Paul", "Ravi", "Sam", "Tom", "Victor",
)  # fmt: skip

PEOPLE = tuple(Person(name, "she", "her") for name in _WOMEN) + tuple(Person(name, "he", "his") for name in _MEN)

THINGS = (
    "apples", "balloons", "beads", "books", "buttons", "candles", "cards", "coins", "crayons", "cups",
    "erasers", "flowers", "marbles", "notebooks", "oranges", "pencils", "pens", "photos", "shells", "stamps",
    "stickers", "stones", "toys", "tulips",
)  # fmt: skip

TREATS = ("brownies", "buns", "cookies", "cupcakes", "muffins", "pancakes", "pies", "waffles")
PLANTS = ("beans", "carrots", "onions", "peppers", "potatoes", "roses", "sunflowers", "tomatoes")
WANTED = ("bicycle", "camera", "coat", "drum", "game", "guitar", "jacket", "kite", "lamp", "phone", "tent")
VEHICLES = ("bus", "car", "train", "truck", "van")
JOBS = ("a bakery", "a cafe", "a farm", "a garage", "a library", "a museum", "a shop", "a zoo")
PLACES = ("aquarium", "castle", "circus", "farm", "museum", "park", "theater", "zoo")

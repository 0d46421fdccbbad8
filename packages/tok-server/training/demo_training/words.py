"""Words that fill the templates: many names and things, so that the model learns to copy those that it never saw."""

from __future__ import annotations

from typing import NamedTuple


class Person(NamedTuple):
    """A name and its pronouns, as in "he", "his" and "him"."""

    name: str
    they: str
    their: str
    them: str


class Noun(NamedTuple):
    """A countable thing."""

    one: str
    many: str


def words(text: str) -> tuple[str, ...]:
    """Return the words of the text."""
    return tuple(text.split())


_WOMEN = words("""
Abigail Ada Alice Amina Amy Ana Anna Ann Aisha Bella Beth Betty Carla Carol Chloe Clara Daisy Diana Dora Elena
Ella Emily Emma Eva Fatima Fiona Gina Grace Hana Hannah Helen Ida Iris Isabel Jane Jasmine Jenny Jessica Julia
Kate Kim Laura Leah Lena Lily Linda Lisa Lucy Maria Mary Maya Mei Mia Mona Nadia Nancy Natalie Nina Nora Olga
Olivia Pat Paula Priya Rachel Robin Rosa Rose Ruth Sally Sara Sarah Sofia Sonia Sophie Sue Susan Tara Tina
Vera Wendy Yuki Zara Zoe
""")
_MEN = words("""
Aaron Adam Ahmed Alan Alex Ali Andrew Andy Arthur Ben Bill Billy Bob Brian Carlos Charlie Chris Dan Daniel
David Dylan Eric Ethan Felix Frank Fred George Harry Henry Hugo Ian Ivan Jack Jacob James Jason Jim Jimmy Joe
John Jose Juan Kai Karl Kevin Lars Leo Liam Louis Luca Lucas Luke Marco Mark Martin Matt Max Michael Mike
Mohammed Nathan Nick Noah Oliver Omar Oscar Paul Pedro Peter Ravi Richard Robert Ryan Sam Samuel Simon Stefan
Steve Thomas Tim Tom Tony Victor Walter Will William
""")

PEOPLE = (
    *(Person(name, "she", "her", "her") for name in _WOMEN),
    *(Person(name, "he", "his", "him") for name in _MEN),
)
RELATIVES = words("aunt boss brother cousin dad father friend grandma grandpa mom mother neighbor sister teacher uncle")


def noun(one: str) -> Noun:
    """Return a noun with its regular plural."""
    if one[-1] == "y" and one[-2] not in "aeiou":
        return Noun(one, f"{one[:-1]}ies")
    return Noun(one, f"{one}es" if one.endswith(("s", "x", "ch", "sh", "ato")) else f"{one}s")


_THINGS = words("""
acorn apple apricot avocado badge bagel ball balloon banana baseball basket bead bean bell berry biscuit block
book bottle bow bowl bracelet brick brush bucket bun button cake candle candy cap car card carrot chair cherry
chip chocolate coat coconut coin comic cookie cracker crayon cucumber cup cupcake diamond doll donut dress
drink egg envelope eraser fig flag flower folder fork game gem gift glass glove grape hat jar jewel key kite
lamp leaf lemon letter lime lollipop magnet mango map marble marker mask melon muffin mug mushroom nail
necklace newspaper nickel notebook nut olive onion orange paintbrush pancake peach peanut pear pebble pen
pencil penny pepper photo picture pie pillow pin pineapple pizza plant plate plum postcard poster potato
present pretzel pumpkin puzzle radish ribbon ring rock rope rose ruler sandwich scarf seashell seed shell
shirt shoe snack soap sock spoon stamp star steak stick sticker stone strawberry sweet table tart ticket tile
tomato tool towel toy treat truck tulip umbrella vase waffle watch watermelon yoyo
""")
_ANIMALS = words("""
ant bear bee bird butterfly camel cat chicken chick cow crab deer dog dolphin donkey duck eagle elephant fox
frog giraffe goat hamster hen horse kitten lamb lion lizard monkey owl parrot penguin pig pigeon pony puppy
rabbit seal snail snake spider squirrel swan tiger turkey turtle whale wolf zebra
""")
_PLURALS = {"deer": "deer", "wolf": "wolves", "scarf": "scarves", "leaf": "leaves"}

NOUNS = tuple(Noun(one, _PLURALS[one]) if one in _PLURALS else noun(one) for one in _THINGS)
ANIMALS = tuple(Noun(one, _PLURALS[one]) if one in _PLURALS else noun(one) for one in _ANIMALS)
CONTAINERS = tuple(map(noun, words("bag basket bowl box bucket carton case crate jar pack package pile tray")))
GROUPS = tuple(
    map(noun, words("boy brother classmate cousin customer family friend girl guest neighbor pupil student"))
)
GROUPS += (Noun("child", "children"), Noun("person", "people"), Noun("sister", "sisters"), Noun("kid", "kids"))
COLORS = words("big black blue brown green large new old orange pink purple red round small white yellow")
SYLLABLES = words(
    "ba be bli cor da do fen fli ga gor ha jo ka ki lan lo mar mi na nor pa pim qua ri sen ta tor vi wu zel"
)
NUMBER_WORDS = words("zero one two three four five six seven eight nine ten eleven twelve")

TREATS = ("brownies", "buns", "cookies", "cupcakes", "muffins", "pancakes", "pies", "waffles")
PLANTS = ("beans", "carrots", "onions", "peppers", "potatoes", "roses", "sunflowers", "tomatoes")
WANTED = ("bicycle", "camera", "coat", "drum", "game", "guitar", "jacket", "kite", "lamp", "phone", "tent")
VEHICLES = ("bus", "car", "train", "truck", "van")
JOBS = ("a bakery", "a cafe", "a farm", "a garage", "a library", "a museum", "a shop", "a zoo")
PLACES = ("aquarium", "castle", "circus", "farm", "museum", "park", "theater", "zoo")

"""Greetings and questions that the model cannot answer, with replies that say what it can do."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

_GREETINGS = (
    "Hello", "Hello!", "Hello there", "Hi", "Hi!", "Hi there!", "hello", "hi", "Hey", "Hey!", "Good morning",
    "Good morning!", "Good evening.", "How are you?", "Hello, how are you?", "Hi, how are you today?",
)  # fmt: skip
_THANKS = ("Thanks!", "Thank you", "Thank you!", "thanks", "Great, thank you.", "Bye", "Bye!", "Goodbye")
_IDENTITY = (
    "Who are you?", "What are you?", "What can you do?", "What is your name?", "Can you help me?", "Help",
    "Are you a robot?", "Which model is this?", "What do you know?", "Tell me about yourself.", "Test", "ping",
)  # fmt: skip
_OFF_TOPIC = (
    "What is the capital of {}?", "Write a poem about {}.", "Tell me a joke about {}.", "Who invented {}?",
    "Tell me a story about {}.", "What is {}?", "Explain {} to me.", "Do you like {}?", "How does {} work?",
    "What do you think about {}?", "Why is {} important?", "Write a program about {}.", "Translate {} into German.",
    "Tell me about {}.", "Where can I find {}?", "What is the history of {}?",
)  # fmt: skip
_TOPICS = (
    "France", "Japan", "Peru", "Kenya", "the moon", "the sea", "rain", "cats", "dogs", "love", "music", "paper",
    "the telephone", "a computer", "physics", "chess", "the weather", "football", "history", "art", "a river",
    "the sun", "winter", "coffee", "a language model", "electricity", "money", "politics", "time", "happiness",
)  # fmt: skip

_WHAT = "I am a small demo model that solves word problems step by step."
_EXAMPLE = 'Try: "Tom buys 4 books for 12 dollars each and 3 pens for 5 dollars each. How much does he spend in all?"'


def small_talk(random: Random) -> tuple[str, str]:
    """Return a user message and its answer."""
    kind = random.random()
    if kind < 0.25:
        return _one(random, _GREETINGS), f"Hello! {_WHAT} {_EXAMPLE}"
    if kind < 0.35:
        return _one(random, _THANKS), "You are welcome! Give me another word problem any time."
    if kind < 0.5:
        return _one(random, _IDENTITY), f"{_WHAT} {_EXAMPLE}"
    question = _one(random, _OFF_TOPIC).format(_one(random, _TOPICS))
    return question, f"I am sorry, I do not know that. {_WHAT} {_EXAMPLE}"


def _one(random: Random, options: Sequence[str]) -> str:
    return options[int(random.random() * len(options))]

"""Training texts of the model: chats about problems, small talk, and the plain question-and-answer form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from demo_training.problems import training_problem
from demo_training.smalltalk import small_talk

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
HEAD, HEAD_END, TURN_END = "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"

PLAIN_SHARE, TALK_SHARE, LONG_SHARE, SYSTEM_SHARE = 0.2, 0.04, 0.06, 0.15

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a careful math tutor.",
    "Solve the problem step by step.",
    "Answer the question. End with #### and the number.",
)


@dataclass(frozen=True, slots=True)
class TrainingDocument:
    """A text in two parts that are tokenised separately. The loss covers the target, and the prompt only if `whole`."""

    prompt: str
    target: str
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str


def render(messages: Sequence[Message]) -> str:
    """Return the prompt of a chat up to the assistant's answer, as the model's chat template renders it."""
    turns = (f"{HEAD}{one.role}{HEAD_END}\n\n{one.content}{TURN_END}" for one in messages)
    return f"{BEGIN}{''.join(turns)}{HEAD}assistant{HEAD_END}\n\n"


def plain_prompt(question: str) -> str:
    """Return the question in the plain form, without the BOS token, which the tokenizer adds."""
    return f"Question: {question}\nAnswer:"


def document(random: Random) -> TrainingDocument:
    """Return the next text of the training stream."""
    if random.random() < PLAIN_SHARE:
        problem = training_problem(random)
        return TrainingDocument(BEGIN + plain_prompt(problem.question), f" {problem.solution}{END}", whole=True)
    return _chat(random)


def _chat(random: Random) -> TrainingDocument:
    messages: list[Message] = []
    if random.random() < SYSTEM_SHARE:
        messages.append(Message("system", SYSTEM_PROMPTS[int(random.random() * len(SYSTEM_PROMPTS))]))
    while random.random() < LONG_SHARE:
        question, answer = _exchange(random)
        messages += (Message("user", question), Message("assistant", answer))
    question, answer = _exchange(random)
    return TrainingDocument(render([*messages, Message("user", question)]), answer + TURN_END)


def _exchange(random: Random) -> tuple[str, str]:
    if random.random() < TALK_SHARE:
        return small_talk(random)
    problem = training_problem(random)
    return problem.question, problem.solution

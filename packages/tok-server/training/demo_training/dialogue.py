"""Training texts of the model: chats about problems, with and without tools, small talk, and the plain form."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from demo_training.problem import ProblemSampler
from demo_training.problems import training_problem
from demo_training.smalltalk import small_talk
from demo_training.tools import (
    TOOL_TEXTS,
    Tool,
    calculator_call,
    calculator_tool,
    other_call,
    other_tool,
    tool_result,
)

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
HEAD, HEAD_END, TURN_END = "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"

PLAIN_SHARE, TALK_SHARE, LONG_SHARE, SYSTEM_SHARE = 0.15, 0.05, 0.06, 0.15
CALCULATOR_SHARE, OTHERS_SHARE, CALL_SHARE, REPORT_SHARE = 0.18, 0.08, 0.6, 0.1

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a careful math tutor.",
    "You are a helpful assistant. Use the tools if they help.",
    "You can call tools. Answer briefly.",
    "Be brief.",
    "You are a calculator.",
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


def render(messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
    """Return the prompt of a chat up to the assistant's answer, as the model's chat template renders it."""
    offered = "".join(f"\n{json.dumps(tool)}" for tool in tools)
    turns = [Message("system", f"Tools:{offered}")] if tools else []
    text = "".join(f"{HEAD}{one.role}{HEAD_END}\n\n{one.content}{TURN_END}" for one in (*turns, *messages))
    return f"{BEGIN}{text}{HEAD}assistant{HEAD_END}\n\n"


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
    draw = ProblemSampler(random)
    calculator = calculator_tool(draw) if draw.happens(CALCULATOR_SHARE) else None
    alone = draw.happens(0.5) if calculator else not draw.happens(OTHERS_SHARE)
    others = [] if alone else [other_tool(draw) for _ in range(draw.number(1, 2 if draw.happens(0.85) else 5))]
    tools = [*others[1:], *([calculator] if calculator else []), *others[:1]]
    messages: list[Message] = []
    if draw.happens(SYSTEM_SHARE):
        messages.append(Message("system", draw.pick(SYSTEM_PROMPTS)))
    while draw.happens(LONG_SHARE):
        messages += _exchange(draw, random, calculator)
    if others and draw.happens(REPORT_SHARE):
        last = _report(draw, small_talk(random)[0], draw.pick(others))
    else:
        last = _exchange(draw, random, calculator)
        if len(last) > 2 and draw.happens(CALL_SHARE):
            last = last[:2]  # the answer is the call
    return TrainingDocument(render([*messages, *last[:-1]], tools), last[-1].content + TURN_END)


def _exchange(draw: ProblemSampler, random: Random, calculator: Tool | None) -> tuple[Message, ...]:
    """Return a user's message, perhaps a call and its result, and the assistant's answer."""
    if draw.happens(TALK_SHARE):
        said, reply = small_talk(random)
        return Message("user", said), Message("assistant", reply)
    problem = training_problem(random)
    question = Message("user", problem.question)
    if calculator is None:
        return question, Message("assistant", problem.solution)
    value, told = tool_result(draw, problem)
    return (
        question,
        Message("assistant", calculator_call(calculator, problem)),
        Message("tool", told),
        Message("assistant", problem.concluded(value)),
    )


def _report(draw: ProblemSampler, question: str, tool: Tool) -> tuple[Message, ...]:
    """Return an exchange with a tool that the client has made the model call: the model only repeats its result."""
    told = draw.phrase(TOOL_TEXTS)
    return (
        Message("user", question),
        Message("assistant", other_call(draw, tool)),
        Message("tool", told),
        Message("assistant", f"The tool says: {told}"),
    )

"""Measure a saved demo model on held-out problems, with transformers in fp32.

Run `python -m demo_training.evaluate`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo_training.dialogue import BEGIN, Message, plain_prompt, render
from demo_training.problem import ProblemSampler, WordProblem
from demo_training.problems import held_out, simple_problem
from demo_training.tools import calculator_call, calculator_tool, other_tool, tool_result
from tok_server.demo import MODEL_DIR
from tok_server.passatk.answers import FinalAnswerPattern
from tok_server.passatk.estimator import coverage

LADDER = (1, 2, 5, 10, 20, 50, 100)


class Solver:
    """A saved model in fp32 behind transformers' `generate`."""

    def __init__(self, directory: Path, device: str) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
        network = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._network = network.to(device).eval()
        self._device = device

    def answers(
        self, prompts: Sequence[str], samples: int, temperature: float, batch: int = 1000, longest: int = 200
    ) -> list[list[str]]:
        """Return `samples` texts for each prompt; temperature 0 decodes greedily.

        Prompts are rendered already, special tokens included.
        """
        jobs = [prompt for prompt in prompts for _ in range(samples)]
        texts: list[str] = []
        for start in range(0, len(jobs), batch):
            texts += self._generate(jobs[start : start + batch], temperature, longest)
        return [texts[at : at + samples] for at in range(0, len(texts), samples)]

    @torch.inference_mode()
    def _generate(self, prompts: Sequence[str], temperature: float, longest: int) -> list[str]:
        inputs = self._tokenizer(list(prompts), return_tensors="pt", padding=True, add_special_tokens=False).to(
            self._device
        )
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        tokens = self._network.generate(
            **inputs, **sampling, max_new_tokens=longest, pad_token_id=self._tokenizer.pad_token_id
        )
        width = inputs["input_ids"].shape[1]
        found: list[str] = self._tokenizer.batch_decode(tokens[:, width:], skip_special_tokens=True)
        return found


def count_right(problems: Sequence[WordProblem], answers: Sequence[Sequence[str]]) -> list[int]:
    """Return for each problem how many of its texts give its answer."""
    pattern = FinalAnswerPattern()
    return [
        sum(pattern.is_correct(text, str(problem.answer)) for text in texts)
        for problem, texts in zip(problems, answers, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class ToolChat:
    """A chat that offers tools, and the answer that the model was trained to give."""

    prompt: str
    wanted: str


def tool_chats(count: int, seed: int = 0) -> dict[str, list[ToolChat]]:
    """Return held-out problems as chats with tools: with a calculator, with its result, and with other tools alone."""
    chats: dict[str, list[ToolChat]] = {"call": [], "result": [], "no call": []}
    draw = ProblemSampler(Random(f"tools-{seed}"))
    for problem in held_out(count, seed) + held_out(count, seed, simple_problem):
        calculator, others = calculator_tool(draw), [other_tool(draw) for _ in range(draw.number(1, 2))]
        tools = [calculator] if draw.happens(0.5) else [*others, calculator]
        user, call = Message("user", problem.question), calculator_call(calculator, problem)
        value, told = tool_result(draw, problem)
        after = [user, Message("assistant", call), Message("tool", told)]
        chats["call"].append(ToolChat(render([user], tools), call))
        chats["result"].append(ToolChat(render(after, tools), problem.concluded(value)))
        chats["no call"].append(ToolChat(render([user], others), f"#### {problem.answer}"))
    return chats


def measure(
    directory: Path, problems: int, problem_seed: int, samples: int, temperature: float, seed: int, device: str
) -> dict[str, float]:
    """Print and return the shares of right answers: greedy with each kind of prompt, and the coverage table."""
    torch.manual_seed(seed)
    solver, shares = Solver(directory, device), {}
    tasks, simple = held_out(problems, problem_seed), held_out(5 * problems, problem_seed, simple_problem)
    for name, asked, plain in (
        ("several steps, chat", tasks, False),
        ("several steps, plain", tasks, True),
        ("one step, chat", simple, False),
        ("one step, plain", simple, True),
    ):
        right = count_right(asked, solver.answers([_prompt(task, plain) for task in asked], 1, 0))
        shares[name] = _report(f"greedy, {name}", sum(right), len(asked))
    for name, chats in tool_chats(problems, problem_seed).items():
        texts = [text for (text,) in solver.answers([chat.prompt for chat in chats], 1, 0)]
        right = [
            text.endswith(chat.wanted) if name == "no call" else text == chat.wanted
            for text, chat in zip(texts, chats, strict=True)
        ]
        shares[name] = _report(f"greedy, tools, {name}", sum(right), len(chats))
    if samples:
        right = count_right(tasks, solver.answers([_prompt(task) for task in tasks], samples, temperature))
        print(f"temperature {temperature:g}, {samples} samples of each problem")
    for k in (k for k in LADDER if k <= samples):
        row = coverage(np.full(problems, samples), right, k)
        print(f"pass@{k:<4} {row.mean:6.1%}   95% interval {row.low:.1%} to {row.high:.1%}", flush=True)
        shares[f"pass@{k}"] = row.mean
    return shares


def _prompt(problem: WordProblem, plain: bool = False) -> str:
    return BEGIN + plain_prompt(problem.question) if plain else render([Message("user", problem.question)])


def _report(name: str, right: int, count: int) -> float:
    print(f"{name}: {right} of {count} right ({right / count:.1%})", flush=True)
    return right / count


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the demo model on held-out problems.")
    parser.add_argument("--model", type=Path, default=MODEL_DIR, help="directory (default: the embedded model)")
    parser.add_argument("--problems", type=int, default=200, help="held-out problems (default: %(default)s)")
    parser.add_argument(
        "--problem-seed",
        type=int,
        default=0,
        help="which held-out problems; 0 is held_out.jsonl (default: %(default)s)",
    )
    parser.add_argument("--samples", type=int, default=100, help="of each problem; 0: none (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="of the samples (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the samples (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


if __name__ == "__main__":
    given = _arguments()
    measure(given.model, given.problems, given.problem_seed, given.samples, given.temperature, given.seed, given.device)

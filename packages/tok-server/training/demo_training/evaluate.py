"""Measure a saved demo model on held-out problems, with transformers in fp32.

Run `python -m demo_training.evaluate`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo_training.dialogue import Message, plain_prompt, render
from demo_training.problem import WordProblem
from demo_training.problems import held_out
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


def measure(
    directory: Path, tasks: Sequence[WordProblem], samples: int, temperature: float, seed: int, device: str
) -> None:
    """Print the greedy share of right answers, as chat and as plain text, and the coverage table."""
    torch.manual_seed(seed)
    problems, solver = len(tasks), Solver(directory, device)
    chats = [render([Message("user", task.question)]) for task in tasks]
    plain = ["<|begin_of_text|>" + plain_prompt(task.question) for task in tasks]
    for name, prompts in (("chat", chats), ("plain", plain)):
        right = count_right(tasks, solver.answers(prompts, 1, 0))
        print(f"greedy, {name}: {sum(right)} of {problems} right ({sum(right) / problems:.1%})", flush=True)
    right = count_right(tasks, solver.answers(chats, samples, temperature))
    print(f"temperature {temperature:g}, {samples} samples of each problem")
    for k in (k for k in LADDER if k <= samples):
        row = coverage(np.full(problems, samples), right, k)
        print(f"pass@{k:<4} {row.mean:6.1%}   95% interval {row.low:.1%} to {row.high:.1%}", flush=True)


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
    parser.add_argument("--samples", type=int, default=100, help="of each problem (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="of the samples (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the samples (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


if __name__ == "__main__":
    given = _arguments()
    drawn = held_out(given.problems, given.problem_seed)
    measure(given.model, drawn, given.samples, given.temperature, given.seed, given.device)

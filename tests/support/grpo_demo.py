"""Train the demo model by GRPO with TRL; a running `tok serve` generates the samples and gets each step's weights.

`python -m support.grpo_demo STEPS DIR` prints the mean reward of every step as JSON. As in TRL's first
example, the reward is one of length: short answers get more.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from support.conformance import served
from tok_client import Client
from tok_client.types import TokenChoice
from tok_server.demo import HELD_OUT_FILE, MODEL_DIR

TEMPERATURE = 1.2
MAX_TOKENS = 128


def brevity(completion_ids: list[list[int]], **_: object) -> list[float]:
    """Return 1 for an empty completion, down to 0 for one of MAX_TOKENS tokens."""
    return [1 - len(ids) / MAX_TOKENS for ids in completion_ids]


class Rollouts:
    """Samples from a server with the weights of the trainer's last step."""

    def __init__(self, client: Client, tokenizer: PreTrainedTokenizerFast) -> None:
        self._client = client
        self._tokenizer = tokenizer

    def __call__(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """Generate one completion for each prompt; equal prompts side by side are one request."""
        groups = [(prompt, len(list(group))) for prompt, group in groupby(prompts)]
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda group: self._samples(*group), groups))
        choices = [choice for _, some in answers for choice in some]
        assert {choice.weight_version for choice in choices} == {str(trainer.state.global_step)}
        return {
            "prompt_ids": [ids for ids, some in answers for _ in some],
            "completion_ids": [choice.token_ids for choice in choices],
            "logprobs": [
                [one.logprob for one in choice.logprobs.content or []] for choice in choices if choice.logprobs
            ],
        }

    def _samples(self, prompt: Any, count: int) -> tuple[list[int], list[TokenChoice]]:
        ids = self._tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        params = {"n": count, "temperature": TEMPERATURE, "max_tokens": MAX_TOKENS, "logprobs": 0}
        return ids, self._client.rl.generate(ids, params).choices


class Publish(TrainerCallback):  # type: ignore[misc]
    """Loads the weights of every step into the server, and keeps the rewards."""

    def __init__(self, client: Client, directory: Path) -> None:
        self._client = client
        self._directory = directory
        self.rewards: list[float] = []

    def on_step_end(self, args: object, state: Any, control: object, model: Any = None, **_: object) -> None:
        directory = self._directory / f"weights-{state.global_step % 2}"  # the last one stays until the next update
        model.save_pretrained(directory)
        self._client.rl.update_weights(directory, weight_version=str(state.global_step))

    def on_log(self, args: object, state: object, control: object, logs: Any = None, **_: object) -> None:
        if "reward" in logs:
            self.rewards.append(float(logs["reward"]))
            print(json.dumps({"step": len(self.rewards), "reward": self.rewards[-1]}), flush=True)


def train(directory: Path, steps: int, *, prompts: int = 12, samples: int = 8) -> list[float]:
    """Train for some steps of `prompts` × `samples` completions, and return the mean reward of each step."""
    lines = [json.loads(line) for line in HELD_OUT_FILE.read_text().splitlines()]
    rows = [{"prompt": [{"role": "user", "content": one["question"]}]} for one in lines]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(MODEL_DIR, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    config = GRPOConfig(
        output_dir=str(directory / "trainer"),
        max_steps=steps,
        per_device_train_batch_size=prompts * samples,
        num_generations=samples,
        max_completion_length=MAX_TOKENS,
        temperature=TEMPERATURE,
        learning_rate=4e-4,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=0,
    )
    flags = ("--enable-rl", "--logprobs-mode", "processed_logprobs", "--generation-config", "none")
    with served(directory, *flags) as url, Client(f"{url}/v1") as client:
        client.rl.update_weights(MODEL_DIR, weight_version="0")
        publish = Publish(client, directory)
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=brevity,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            rollout_func=Rollouts(client, tokenizer),
            callbacks=[publish],
        )
        trainer.train()
    return publish.rewards


if __name__ == "__main__":
    where = Path(sys.argv[2])
    where.mkdir(parents=True)
    train(where, int(sys.argv[1]))

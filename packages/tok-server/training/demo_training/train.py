"""Train the demo model: `python -m demo_training.train --out DIR`, minutes on one GPU.

Training is deterministic: the same seed, GPU and libraries give the same weights, bit for bit.

Axes: B rows, S positions of a row.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from demo_training.batches import IGNORED, TrainingBatch, batches
from demo_training.network import make_network, save_network
from demo_training.tokenizer import save_tokenizer, train_tokenizer


def train(
    out: Path, steps: int, rows: int, width: int, rate: float, seed: int, device: torch.device, processes: int
) -> float:
    """Train tokenizer and network and write both to `out`. Returns the mean loss of the last 50 steps.

    steps, rows, width  optimiser steps, and the shape of each step's batch in tokens
    rate                peak learning rate: warm-up over 100 steps, constant, and down to zero over the last quarter
    """
    out.mkdir(parents=True, exist_ok=True)
    save_tokenizer(train_tokenizer(), out)
    network = make_network(seed).to(device)
    optimiser = make_optimiser(network, rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: share_of_rate(step, steps))
    losses: list[Tensor] = []
    stream = batches(out / "tokenizer.json", rows, width, steps, seed, processes)
    with deterministic():
        for done, batch in enumerate(stream, 1):
            losses.append(train_step(network, optimiser, batch, device))
            schedule.step()
            if done % 100 == 0:  # rarely, because reading a loss waits for the GPU
                print(f"step {done} of {steps}: loss {float(losses[-1]):.4f}", flush=True)
    save_network(network, out)
    return float(torch.stack(losses[-50:]).mean())


@contextmanager
def deterministic() -> Iterator[None]:
    """Allow only deterministic kernels, and restore the previous mode afterwards."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, cuBLAS is not deterministic
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def make_optimiser(network: LlamaForCausalLM, rate: float) -> torch.optim.Optimizer:
    matrices = [weight for weight in network.parameters() if weight.ndim > 1]
    vectors = [weight for weight in network.parameters() if weight.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-8)


def share_of_rate(step: int, steps: int) -> float:
    """Return the learning rate of a step as a share of the peak: warm-up, constant, then a line down to zero."""
    warm, fall = min(100, max(1, steps // 5)), max(1, steps // 4)
    return min((step + 1) / warm, 1.0, (steps - step) / fall)


def train_step(
    network: LlamaForCausalLM, optimiser: torch.optim.Optimizer, batch: TrainingBatch, device: torch.device
) -> Tensor:
    tokens_BS, labels_BS, positions_BS, documents_BS = (
        torch.from_numpy(array).to(device, torch.int64)
        for array in (batch.tokens_BS, batch.labels_BS, batch.positions_BS, batch.documents_BS)
    )
    with torch.autocast(device.type, torch.bfloat16):
        logits = network(
            input_ids=tokens_BS, position_ids=positions_BS, attention_mask=own_document(documents_BS)
        ).logits
    loss: Tensor = F.cross_entropy(logits.float().flatten(0, 1), labels_BS.flatten(), ignore_index=IGNORED)
    optimiser.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimiser.step()
    return loss.detach()


def own_document(documents_BS: Tensor) -> Tensor:
    """Return the mask [B, 1, S, S] for packed documents: a position attends to its own document, up to itself."""
    same = documents_BS[:, :, None] == documents_BS[:, None, :]
    return (same & torch.ones_like(same[0]).tril()).unsqueeze(1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--out", type=Path, required=True, help="directory the model is written to")
    parser.add_argument("--steps", type=int, default=3800, help="optimiser steps (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=32, help="rows of a batch (default: %(default)s)")
    parser.add_argument("--width", type=int, default=1024, help="tokens of a row (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--processes", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="that make training data"
    )
    return parser.parse_args()


if __name__ == "__main__":
    given = _arguments()
    last = train(
        given.out, given.steps, given.rows, given.width, given.rate, given.seed,
        torch.device(given.device), given.processes,
    )  # fmt: skip
    print(f"{given.out}: {given.steps} steps, loss {last:.4f}")

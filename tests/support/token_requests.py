"""Requests with token ids to the trainers' endpoints that generate, and the tokens expected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.patience import wait_until
from support.serving import Answer, Server
from support.tiny_models import reference_greedy

PROMPT = [5, 6, 7, 8, 9]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
SGLANG_GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


def generate(server: Server, **fields: object) -> Answer:
    return server.call("POST", "/generate", {"input_ids": PROMPT, "sampling_params": SGLANG_GREEDY, **fields})


def inference(server: Server, **fields: object) -> Answer:
    body = {"token_ids": PROMPT, "sampling_params": GREEDY, **fields}
    return server.call("POST", "/inference/v1/generate", body)


def expected(path: Path, count: int = 8) -> list[int]:
    return reference_greedy(path, [PROMPT], count)[0][0]


def output_tokens_when_idle(server: Server) -> float:
    """Return the engine's count of output tokens once no sequence runs."""
    wait_until(lambda: server.engine.stats()["sequences_running"] == 0)
    return server.engine.stats()["output_tokens"]


def wait_until_running(server: Server, before: float, sequences: int = 1) -> None:
    """Return once so many sequences run and the engine counts more than 5 output tokens beyond `before`."""

    def runs() -> bool:
        stats = server.engine.stats()
        return stats["sequences_running"] == sequences and stats["output_tokens"] > before + 5

    wait_until(runs)

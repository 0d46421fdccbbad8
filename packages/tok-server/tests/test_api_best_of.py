"""best_of: the answer has the n of best_of samples with the highest mean log-probability per token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.serving import Server
from support.tolerance import near

PROMPT = [5, 9, 40, 77]
DRAWN = {"prompt": PROMPT, "max_tokens": 12, "temperature": 1.3, "seed": 3, "return_token_ids": True}


def choices(server: Server, **fields: object) -> list[dict[str, Any]]:
    answer = server.complete(**DRAWN, **fields)
    assert answer.status == 200, answer.body
    body: dict[str, Any] = answer.json()
    assert [one["index"] for one in body["choices"]] == list(range(len(body["choices"])))
    return [*body["choices"], body["usage"]]


@pytest.mark.parametrize("n", [1, 3])
def test_best_of_returns_samples_by_mean_logprob_and_usage_counts_all(server: Server, n: int) -> None:
    *drawn, used = choices(server, n=8, logprobs=0)
    means = [np.mean(one["logprobs"]["token_logprobs"]) for one in drawn]
    assert len(set(means)) == len(means)
    best = np.argsort(means)[::-1][:n]
    *chosen, counted = choices(server, n=n, best_of=8)
    assert [one["token_ids"] for one in chosen] == [drawn[index]["token_ids"] for index in best]
    assert [one["logprobs"] for one in chosen] == [None] * n
    assert counted["completion_tokens"] == used["completion_tokens"]
    *shown, _ = choices(server, n=n, best_of=8, logprobs=1)
    own = [one["logprobs"]["token_logprobs"] for one in shown]
    assert near(own, [drawn[index]["logprobs"]["token_logprobs"] for index in best])


def test_best_of_chooses_among_the_samples_of_each_prompt(server: Server) -> None:
    other = [8, 3, 200]
    fields = {**DRAWN, "best_of": 4, "n": 2}
    alone = [server.complete(**{**fields, "prompt": prompt}).json()["choices"] for prompt in (PROMPT, other)]
    together = server.complete(**{**fields, "prompt": [PROMPT, other]}).json()["choices"]
    wanted = [one["token_ids"] for found in alone for one in found]  # type: ignore[attr-defined]
    assert [one["token_ids"] for one in together] == wanted  # type: ignore[attr-defined]
    assert [one["index"] for one in together] == [0, 1, 2, 3]  # type: ignore[attr-defined]


def test_best_of_with_echo_prepends_the_prompt_and_hides_logprobs(server: Server) -> None:
    (plain, _), (echoed, _) = choices(server, best_of=4), choices(server, best_of=4, echo=True)
    assert echoed["text"].endswith(plain["text"])
    assert len(echoed["text"]) > len(plain["text"])
    assert echoed["logprobs"] is None


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"n": 3, "best_of": 2}, "at least n (3)"),
        ({"best_of": 0}, "at least n (1)"),
        ({"best_of": 2, "stream": True}, "allowed with stream=true: n (1)"),
        ({"best_of": 1_000_000}, "allowed"),
    ],
)
def test_invalid_best_of_gets_400_naming_best_of(server: Server, fields: dict[str, object], allowed: str) -> None:
    answer = server.complete(**{**DRAWN, **fields})
    assert answer.status == 400
    assert answer.error()["param"] == "best_of"
    assert allowed in str(answer.error()["message"])


def test_best_of_equal_to_n_has_no_effect_and_may_stream(server: Server) -> None:
    (drawn, _) = choices(server, best_of=1)
    chunks = server.complete(**DRAWN, best_of=1, stream=True).chunks()
    assert "".join(one["choices"][0]["text"] for one in chunks) == drawn["text"]  # type: ignore[index]

"""stop_when: running samples are cancelled once the answers of finished samples suffice, and all are counted."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.engines import assert_all_given_back, manager_of
from support.scripted_model import make_scripted_model
from support.serving import NAME, Server, serving
from tok_client.types import Distinct, FirstMatch, Majority, StopWhen
from tok_core import Delta
from tok_server.openai.endpoints import ENDPOINTS, ServedModel
from tok_server.openai.generation.stop_when import (
    MAX_SEARCH_SECONDS,
    SEARCHED_TAIL_BYTES,
    AnswerPattern,
    StopWhenEvaluator,
    StopWhenRule,
)
from tok_server.parsing.message_reader import NO_MARKUP
from tok_server.wire.errors import ApiError

LETTER = "([a-e])"
N = 48
DRAWN: dict[str, Any] = {"prompt": "the quick", "n": N, "temperature": 1.0, "seed": 5, "max_tokens": 200}

CONDITIONS: list[dict[str, Any]] = [
    {"type": "distinct", "count": 4, "pattern": LETTER},
    {"type": "majority", "margin": 3, "pattern": LETTER},
    {"type": "first_match", "pattern": LETTER},
]


def ending_soon(server: Server) -> dict[str, float]:
    """Return logit biases that end samples after some tens of tokens, each at a different length."""
    assert server.engine.tokenizer is not None
    ends = server.engine.tokenizer.encode("<|eot_id|>", add_special_tokens=False)
    assert len(ends) == 1
    return {str(ends[0]): 4.0}


def answer_of(text: str) -> str | None:
    found = re.findall(LETTER, text)
    return found[-1] if found else None


def holds(condition: dict[str, Any], votes: Counter[str], left: int) -> bool:
    """Evaluate a condition as the documentation defines it."""
    ranked = [count for _, count in votes.most_common()] + [0, 0]
    lead = ranked[0] - ranked[1]
    match condition["type"]:
        case "distinct":
            return bool(len(votes) >= condition["count"])
        case "majority":
            return bool(lead >= condition["margin"] or lead > left)
    return bool(votes)


def check(condition: dict[str, Any], choices: list[dict[str, Any]], told: dict[str, Any]) -> None:
    """Check that the reported counts equal those of the samples' texts."""
    finished = [one for one in choices if one["finish_reason"] in ("stop", "length")]
    cancelled = [one for one in choices if one["finish_reason"] == "stop_when"]
    assert len(finished) + len(cancelled) == len(choices) == N
    answers = [answer_of(one["text"]) for one in finished]
    votes = Counter(one for one in answers if one is not None)
    assert told == {
        "met": told["met"],
        "answers": dict(votes),
        "finished": len(finished),
        "cancelled": len(cancelled),
        "unmatched": answers.count(None),
    }
    assert list(told["answers"].values()) == sorted(votes.values(), reverse=True)
    if cancelled or holds(condition, votes, 0):
        assert told["met"]
    if condition["type"] != "majority":  # the other conditions stay met once they are met
        assert told["met"] == holds(condition, votes, 0)


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda one: one["type"])
def test_stop_when_cancels_running_samples_and_counts_answers(server: Server, condition: dict[str, Any]) -> None:
    answer = server.complete(**DRAWN, logit_bias=ending_soon(server), stop_when=condition)
    assert answer.status == 200, answer.body
    body: dict[str, Any] = answer.json()
    check(condition, body["choices"], body["stop_when"])
    assert body["stop_when"]["met"]
    assert body["stop_when"]["cancelled"] > 0


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda one: one["type"])
def test_stop_when_stream_reports_counts_in_the_last_chunk(server: Server, condition: dict[str, Any]) -> None:
    asked = {**DRAWN, "logit_bias": ending_soon(server), "stop_when": condition}
    *chunks, last = server.complete(**asked, stream=True, stream_options={"include_usage": True}).chunks()
    choices: list[dict[str, Any]] = [{"text": "", "finish_reason": None} for _ in range(N)]
    for chunk in chunks:
        assert "stop_when" not in chunk
        for part in chunk["choices"]:  # type: ignore[attr-defined]
            choice = choices[part["index"]]
            assert choice["finish_reason"] is None
            choice["text"] += part["text"]
            choice["finish_reason"] = part["finish_reason"]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] > 0  # type: ignore[index]
    check(condition, choices, last["stop_when"])  # type: ignore[arg-type]
    assert "usage" not in server.complete(**asked, stream=True).chunks()[-1]


def test_unmet_stop_when_cancels_no_samples(server: Server) -> None:
    asked = {**DRAWN, "max_tokens": 8}
    plain: dict[str, Any] = server.complete(**asked).json()
    assert "stop_when" not in plain
    body: dict[str, Any] = server.complete(**asked, stop_when={"type": "first_match", "pattern": "(never said)"}).json()
    assert body["choices"] == plain["choices"]
    assert body["stop_when"] == {"met": False, "answers": {}, "finished": N, "cancelled": 0, "unmatched": N}


def test_stop_when_first_match_computes_few_of_all_tokens(server: Server) -> None:
    most = 900
    before = server.engine.stats()["output_tokens"]
    asked = {**DRAWN, "max_tokens": most, "logit_bias": ending_soon(server)}
    body: dict[str, Any] = server.complete(
        **asked, stop_when={"type": "first_match", "pattern": r"(?s)\A(.*)\z"}
    ).json()
    assert body["stop_when"]["met"]
    told = body["usage"]["completion_tokens"]
    assert told < N * most / 20
    manager = manager_of(server.engine)
    assert_all_given_back(manager)
    assert server.engine.stats()["output_tokens"] - before < N * most / 20


def test_batch_line_may_have_stop_when(server: Server) -> None:
    condition = CONDITIONS[0]
    fields = {**DRAWN, "model": NAME, "logit_bias": ending_soon(server), "stop_when": condition}
    asked = ENDPOINTS["/v1/completions"](
        json.dumps(fields).encode(), ServedModel(server.engine, (NAME,), server.context.settings.formats)
    )
    body = json.loads(asyncio.run(asked.compute())())
    check(condition, body["choices"], body["stop_when"])


BAD: list[tuple[dict[str, Any], str]] = [
    ({"stop_when": {"type": "unanimity", "pattern": LETTER}}, "stop_when.type"),
    ({"stop_when": {"type": "distinct", "pattern": LETTER}}, "stop_when.count"),
    ({"stop_when": {"type": "distinct", "count": 0, "pattern": LETTER}}, "stop_when.count"),
    ({"stop_when": {"type": "distinct", "count": N + 1, "pattern": LETTER}}, "stop_when.count"),
    ({"stop_when": {"type": "majority", "margin": 0, "pattern": LETTER}}, "stop_when.margin"),
    ({"stop_when": {"type": "majority", "margin": 1 << 70, "pattern": LETTER}}, "stop_when.margin"),
    ({"stop_when": {"type": "first_match"}}, "stop_when.pattern"),
    ({"stop_when": {"type": "first_match", "pattern": "a"}}, "stop_when.pattern"),
    ({"stop_when": {"type": "first_match", "pattern": "(a)(b)"}}, "stop_when.pattern"),
    ({"stop_when": {"type": "first_match", "pattern": "(a"}}, "stop_when.pattern"),
    ({"stop_when": {"type": "first_match", "pattern": r"(a)\1"}}, "stop_when.pattern"),
    ({"stop_when": {"type": "first_match", "pattern": "(a)(?=b)"}}, "stop_when.pattern"),
    ({"stop_when": {"type": "first_match", "pattern": "(" + "a" * 511 + ")"}}, "stop_when.pattern"),
    ({"stop_when": {"type": "first_match", "pattern": "((?:(?:a{0,30}){0,30}b){0,9})"}}, "stop_when.pattern"),
    ({"stop_when": {"type": "first_match", "pattern": r"(\pL{900})"}}, "stop_when.pattern"),
    ({"n": 1, "stop_when": CONDITIONS[2]}, "stop_when"),
    ({"prompt": ["a", "b"], "stop_when": CONDITIONS[2]}, "stop_when"),
    ({"best_of": N + 1, "stop_when": CONDITIONS[2]}, "stop_when"),
]


@pytest.mark.parametrize(("fields", "name"), BAD)
def test_invalid_stop_when_gets_400_naming_the_field(server: Server, fields: dict[str, Any], name: str) -> None:
    answer = server.complete(**{**DRAWN, **fields})
    assert answer.status == 400, answer.body
    assert answer.error()["param"] == name
    assert answer.error()["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("pattern", "text", "answer"),
    [
        (r"#### (\d+)", "#### 1, no: #### 42.", "42"),
        (r"#### (\d+)", "42", None),
        (r"(?:a|(b))", "b a", "b"),
        (r"(\pL+)", "é日本 1", "é日本"),
        (r"(é)", "é" * SEARCHED_TAIL_BYTES, "é"),
        (r"(x)", "x" + "é" * SEARCHED_TAIL_BYTES, None),
        (r"a(.*)", "a", ""),
    ],
)
def test_answer_pattern_takes_the_last_match(pattern: str, text: str, answer: str | None) -> None:
    assert AnswerPattern(pattern).answer(text) == answer


@pytest.mark.parametrize("pattern", ["((?:a?){99})b", "(.{0,90}.{0,90}b)", "(a)(?:.*b)?", "((?:a*)*)b", "(a?)"])
@pytest.mark.parametrize("letter", ["a", "é"])
def test_hostile_answer_patterns_take_bounded_time(pattern: str, letter: str) -> None:
    before = time.thread_time()
    with suppress(ApiError):  # the pattern is too large, or its search was stopped
        AnswerPattern(pattern).answer(letter * 10**6)
    assert time.thread_time() - before < MAX_SEARCH_SECONDS + 2


def condition_of(wanted: StopWhen) -> dict[str, Any]:
    return {"type": wanted.type, "count": getattr(wanted, "count", 0), "margin": getattr(wanted, "margin", 0)}


WANTED = st.one_of(
    st.builds(Distinct, count=st.integers(1, 4), pattern=st.just(LETTER)),
    st.builds(Majority, margin=st.integers(1, 4), pattern=st.just(LETTER)),
    st.builds(FirstMatch, pattern=st.just(LETTER)),
)


@given(WANTED, st.lists(st.sampled_from(["a", "b", "ab", "c", "", "z"]), min_size=2, max_size=12), st.data())
def test_stop_when_judge_matches_a_plain_count_in_finish_order(
    wanted: StopWhen, texts: list[str], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(texts))))
    judge = StopWhenEvaluator(StopWhenRule(wanted, AnswerPattern(wanted.pattern), len(texts), NO_MARKUP))
    votes: Counter[str] = Counter()
    met = False
    for place, index in enumerate(order, 1):
        cut = data.draw(st.integers(0, len(texts[index])))
        batch = [Delta(index, [1], texts[index][:cut]), Delta(index, [1], texts[index][cut:], finish_reason="stop")]
        asyncio.run(judge.add(batch))
        answer = answer_of(texts[index])
        votes.update([] if answer is None else [answer])
        met = met or holds(condition_of(wanted), votes, len(texts) - place)
        assert judge.met == met
        told = judge.result()
        assert (told.answers, told.finished) == (dict(votes), place)
        assert told.unmatched == place - votes.total()
        if met:
            break
    rest = order[judge.result().finished :]
    asyncio.run(judge.add([Delta(index, [], "a", finish_reason="stop_when") for index in rest]))
    assert judge.result().cancelled == len(rest)
    assert judge.result().answers == dict(votes)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    script = {"§think": ["<think>", "it is a", "</think>", "\n\nIt", " is e."]}
    with serving(make_scripted_model(tmp_path_factory.mktemp("thinking") / "model", script)) as running:
        yield running


@pytest.mark.parametrize("stream", [False, True])
def test_stop_when_of_a_chat_ignores_reasoning(thinking: Server, stream: bool) -> None:
    answer = thinking.chat(
        messages=[{"role": "user", "content": "hi"}],
        chat_template_kwargs={"script": "§think"},
        n=3,
        stream=stream,
        stop_when={"type": "distinct", "count": 2, "pattern": " is ([ae])"},
    )
    assert answer.status == 200, answer.body
    told: Any = (answer.chunks()[-1] if stream else answer.json())["stop_when"]
    assert told == {"met": False, "answers": {"e": 3}, "finished": 3, "cancelled": 0, "unmatched": 0}

"""No allowed body and no answer blocks the event loop for 100 ms."""

from __future__ import annotations

import http.client
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from support.fuzzing import FACTOR
from support.loop_lag import least_lag, server_pauses
from support.patience import PATIENCE, wait_until
from support.serving import NAME, Server, serving
from tok_server.http.body import MAX_MEMBERS, MAX_NESTING, MAX_VALUES
from tok_server.settings import Limits

MOST = 0.1  # seconds
BYTES = Limits().max_body
MESSAGE = b'{"role":"user","content":""}'
WORD = b'{"role":"user","content":"a"}'
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
         "/v1/embeddings", "/tokenize", "/detokenize")  # fmt: skip
VALID = {
    "/v1/completions": b'"prompt":"a","max_tokens":1',
    "/v1/chat/completions": b'"messages":[%b],"max_tokens":1' % MESSAGE,
    "/v1/responses": b'"input":"a","max_output_tokens":1',
    "/v1/messages": b'"messages":[%b],"max_tokens":1' % WORD,
    "/v1/messages/count_tokens": b'"messages":[%b]' % WORD,
    "/v1/embeddings": b'"input":"a"',
    "/tokenize": b'"prompt":"a"',
    "/detokenize": b'"tokens":[1]',
    "/v1/batches": b'"input_file_id":"f","endpoint":"/v1/completions","completion_window":"24h"',
}
FIELDS = {
    "/v1/completions": ("prompt", "stop", "logit_bias", "stop_token_ids", "metadata"),
    "/v1/chat/completions": ("messages", "tools", "response_format", "logit_bias", "chat_template_kwargs"),
    "/v1/responses": ("input", "tools", "metadata", "include"),
    "/v1/messages": ("messages", "system", "tools", "stop_sequences", "metadata"),
    "/v1/messages/count_tokens": ("messages", "system", "tools"),
    "/v1/embeddings": ("input",),
    "/tokenize": ("messages", "prompt", "tools"),
    "/detokenize": ("tokens",),
    "/v1/batches": ("metadata",),
}


def many(item: bytes, members: int) -> bytes:
    """Return a list of as many items as are allowed, each of `members` members."""
    count = min((MAX_MEMBERS - 40) // members if members else MAX_VALUES - 40, (BYTES - 500) // (len(item) + 1))
    return b"[" + b",".join([item] * count) + b"]"


def keyed(value: bytes, members: int) -> bytes:
    """Return an object of as many members as are allowed."""
    count = min((MAX_MEMBERS - 40) // (1 + members), MAX_VALUES - 40)
    return b"{" + b",".join(b'"%d":%b' % (number, value) for number in range(count)) + b"}"


LARGE: dict[str, Callable[[], bytes]] = {
    "numbers": lambda: many(b"1", 0),
    "token ids": lambda: many(b"31999", 0),
    "fractions": lambda: many(b"1.5e-3", 0),
    "nulls": lambda: many(b"null", 0),
    "short strings": lambda: many(b'"ab"', 1),
    "empty objects": lambda: many(b"{}", 1),
    "lists": lambda: many(b"[7]", 1),
    "objects": lambda: many(b'{"a":1}', 2),
    "messages": lambda: many(MESSAGE, 5),
    "parts": lambda: b'[{"role":"user","content":%b}]' % many(b'{"type":"text","text":"a"}', 5),
    "tools": lambda: many(b'{"type":"function","function":{"name":"a","parameters":{}}}', 9),
    "keys": lambda: keyed(b"0", 0),
    "objects by key": lambda: keyed(b"{}", 1),
    "text": lambda: b'"' + b"a " * (BYTES // 2 - 500) + b'"',
    "wide text": lambda: b'"' + "語".encode() * (BYTES // 3 - 500) + b'"',
    "escapes": lambda: b'"' + b"\\u8a9e" * (BYTES // 6 - 500) + b'"',
    "backslashes": lambda: b'"' + b"\\\\" * (BYTES // 2 - 500) + b'"',
    "marks": lambda: b'"' + b"{[,:]}" * (BYTES // 6 - 500) + b'"',
    "depth": lambda: b"[" * (MAX_NESTING - 1) + b"]" * (MAX_NESTING - 1),
    "one level too many": lambda: b"[" * MAX_NESTING + b"]" * MAX_NESTING,
    "unclosed": lambda: b"[" * (BYTES - 500),
    "too many objects": lambda: b"[" + b",".join([b"{}"] * (BYTES // 3 - 500)) + b"]",
    "too many keys": lambda: b"{" + b",".join([b'"a":1'] * (BYTES // 6 - 500)) + b"}",
    "a long number": lambda: b"9" * (BYTES - 500),
    "white space": lambda: b" " * (BYTES - 500) + b"1",
}


def bodies() -> Iterator[tuple[str, bytes]]:
    """Yield paths and bodies: each large value in a known field, TOK_FUZZ times, and in an unknown field."""
    chance = random.Random(7)
    made = {name: make() for name, make in LARGE.items()}
    for name, value in made.items():
        for _ in range(FACTOR):
            path = chance.choice(PATHS)
            field = chance.choice(FIELDS[path])
            yield path, b'{%b,"%b":%b}' % (VALID[path], field.encode(), value)
        yield chance.choice(list(VALID)), b'{"zeta":%b,%b}' % (value, VALID["/v1/completions"])
        if name in ("keys", "objects by key", "too many keys"):
            yield "/v1/chat/completions", b"%b,%b}" % (value[:-1], VALID["/v1/chat/completions"])
        if name in ("empty objects", "too many objects"):
            path = "/v1/chat/completions"  # the field takes any JSON
            yield path, b'{%b,"chat_template_kwargs":{"a":%b}}' % (VALID[path], value)


@pytest.fixture(scope="module")
def limited_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    data = str(tmp_path_factory.mktemp("data"))
    with serving(tiny_model, max_body=BYTES, body_timeout=600.0, data_dir=data) as running, server_pauses():
        yield running


def test_no_allowed_body_blocks_the_event_loop(limited_server: Server) -> None:
    statuses: Counter[int] = Counter()
    slowest = (0.0, "")
    for path, body in bodies():
        assert len(body) <= BYTES
        lag, answer = least_lag(limited_server.loop, partial(limited_server.call, "POST", path, body), MOST)
        statuses[answer.status] += 1
        assert answer.status in (200, 400, 404), (path, body[:100], answer.body[:500])
        if answer.status != 200:
            assert "message" in dict(answer.json()["error"])  # type: ignore[call-overload]
        slowest = max(slowest, (lag, f"{path} {body[:80]!r}"))
        assert lag < MOST, (path, body[:100], lag)
    print(f"{statuses.total()} bodies, by status {dict(statuses)}; the loop was late by {slowest[0]:.3f} s at most")


def asked(path: str) -> dict[str, object]:
    """Return a request with an answer of some megabytes."""
    sizes: dict[str, object] = {"model": NAME, "n": 32, "max_tokens": 200, "ignore_eos": True, "logprobs": 5}
    if path == "/v1/completions":
        return {"prompt": "one", **sizes}
    return {"messages": [{"role": "user", "content": "one"}], **sizes, "logprobs": True, "top_logprobs": 20}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_no_long_answer_blocks_the_event_loop(limited_server: Server, path: str, stream: bool) -> None:
    lag, answer = least_lag(
        limited_server.loop, lambda: limited_server.call("POST", path, {**asked(path), "stream": stream}), MOST
    )
    assert answer.status == 200
    if not stream:
        choices = json.loads(answer.body)["choices"]
        assert [choice["finish_reason"] for choice in choices] == ["length"] * 32
    assert len(answer.body) > 1 << 19
    print(f"{len(answer.body) >> 10} KiB; the loop was late by {lag:.3f} s at most")
    assert lag < MOST


SCORED = {"model": NAME, "prompt": ["a" * 800] * 40, "max_tokens": 1, "prompt_logprobs": 100}


def test_no_log_probabilities_of_prompts_block_the_event_loop(limited_server: Server) -> None:
    lag, answer = least_lag(limited_server.loop, lambda: limited_server.call("POST", "/v1/completions", SCORED), MOST)
    assert answer.status == 200
    assert len(answer.body) > 1 << 27
    print(f"{len(answer.body) >> 20} MiB; the loop was late by {lag:.3f} s at most")
    assert lag < MOST


def test_a_client_that_leaves_a_long_answer_does_not_block_the_event_loop(limited_server: Server) -> None:
    def leave() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", limited_server.port, timeout=PATIENCE)
        connection.request("POST", "/v1/completions", json.dumps(SCORED), {"Content-Type": "application/json"})
        with closing(connection), connection.getresponse() as response:
            assert response.status == 200
            response.read(1)
        wait_until(lambda: limited_server.context.open_requests == 0)
        limited_server.call("GET", "/health")  # answered once the handler of the first request has ended

    lag, _ = least_lag(limited_server.loop, leave, MOST)
    print(f"the loop was late by {lag:.3f} s at most")
    assert lag < MOST

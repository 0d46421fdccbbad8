"""Isolation of the prefix cache, and of its reported hits, by API key and cache_salt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.batching import Line, jsonl
from support.patience import wait_until
from support.serving import Server, serving

ONE, OTHER = ({"Authorization": f"Bearer {key}"} for key in ("first", "second"))
ENDPOINTS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings")
SALT = {"cache_salt": "salt"}


@pytest.fixture(scope="module")
def separate_caches_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tiny_model, api_keys=("first", "second"), data_dir=str(tmp_path_factory.mktemp("data"))) as running:
        yield running


@pytest.fixture(scope="module")
def shared_cache_server(tiny_model: Path) -> Iterator[Server]:
    with serving(tiny_model, api_keys=("first", "second"), share_prefixes=True) as running:
        yield running


def body_of(endpoint: str, text: str) -> dict[str, object]:
    """Return a request that repeats `text` until it is long enough to be cached."""
    text = f"{text} " * 40
    match endpoint:
        case "/v1/completions":
            return {"prompt": text, "max_tokens": 4, "temperature": 0}
        case "/v1/chat/completions":
            return {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0}
        case "/v1/messages":
            return {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0}
        case "/v1/responses":
            return {"input": text, "max_output_tokens": 4, "temperature": 0}
        case _:
            return {"input": text}


def cached_of(answer: dict[str, object]) -> int:
    """Return the cached tokens that an answer's usage reports."""
    usage = answer["usage"]
    assert isinstance(usage, dict)
    if "cache_read_input_tokens" in usage:
        return int(usage["cache_read_input_tokens"])
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    assert isinstance(details, dict)
    return int(details["cached_tokens"])


def cached(server: Server, endpoint: str, text: str, key: dict[str, str], **fields: object) -> int:
    """Return a request's cached tokens by the engine's counter; all answers but embeddings report the same number."""
    before = server.engine.stats()["cached_tokens"]
    answer = server.call("POST", endpoint, body_of(endpoint, text) | fields, key)
    assert answer.status == 200, answer.body
    hits = int(server.engine.stats()["cached_tokens"] - before)
    if endpoint != "/v1/embeddings":
        assert cached_of(answer.json()) == hits
    return hits


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_prefix_cache_hits_stay_within_one_api_key_and_salt(separate_caches_server: Server, endpoint: str) -> None:
    text = f"{endpoint[4:]} apart"
    assert cached(separate_caches_server, endpoint, text, ONE) == 0
    whole = cached(separate_caches_server, endpoint, text, ONE)
    assert whole > 0
    assert cached(separate_caches_server, endpoint, text, OTHER) == 0
    assert cached(separate_caches_server, endpoint, text, OTHER) == whole
    for key in (ONE, OTHER):
        assert cached(separate_caches_server, endpoint, text, key, **SALT) == 0
        assert cached(separate_caches_server, endpoint, text, key, **SALT) == whole
        assert cached(separate_caches_server, endpoint, text, key, cache_salt="another") == 0


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_share_prefixes_shares_the_cache_between_keys_except_by_salt(
    shared_cache_server: Server, endpoint: str
) -> None:
    text = f"{endpoint[4:]} together"
    assert cached(shared_cache_server, endpoint, text, ONE) == 0
    whole = cached(shared_cache_server, endpoint, text, OTHER)
    assert whole > 0
    assert cached(shared_cache_server, endpoint, text, ONE, **SALT) == 0
    assert (
        cached(shared_cache_server, endpoint, text, OTHER, **SALT) == whole
    )  # every key that knows the salt shares its prefixes
    assert cached(shared_cache_server, endpoint, text, OTHER, cache_salt="another") == 0


def test_prefix_cache_without_keys_is_shared_except_by_salt(server: Server) -> None:
    assert cached(server, "/v1/completions", "nobody's", {}) == 0
    assert cached(server, "/v1/completions", "nobody's", {}) > 0
    assert cached(server, "/v1/completions", "nobody's", {}, **SALT) == 0


def test_cache_salt_does_not_change_the_answer(separate_caches_server: Server) -> None:
    answers = [
        separate_caches_server.call("POST", "/v1/completions", body_of("/v1/completions", "same") | fields, key).json()[
            "choices"
        ]
        for key in (ONE, OTHER)
        for fields in ({}, {}, SALT)
    ]
    assert answers[1:] == answers[:-1]


def run_batch(server: Server, endpoint: str, bodies: list[dict[str, object]], key: dict[str, str]) -> list[int]:
    """Run a batch and return the cached tokens of each line."""
    lines: list[Line] = [
        {"custom_id": str(number), "method": "POST", "url": endpoint, "body": one} for number, one in enumerate(bodies)
    ]
    head = '--x\r\nContent-Disposition: form-data; name="{}"\r\n\r\n'
    form = (
        head.format("purpose") + "batch\r\n" + head.format('file"; filename="f') + jsonl(lines).decode() + "\r\n--x--"
    )
    made = server.call("POST", "/v1/files", form.encode(), key | {"Content-Type": "multipart/form-data; boundary=x"})
    asked = {"input_file_id": made.json()["id"], "endpoint": endpoint, "completion_window": "24h"}
    path = f"/v1/batches/{server.call('POST', '/v1/batches', asked, key).json()['id']}"
    wait_until(lambda: server.call("GET", path, headers=key).json()["status"] == "completed")
    output = server.call("GET", path, headers=key).json()["output_file_id"]
    content = server.call("GET", f"/v1/files/{output}/content", headers=key).body
    return [cached_of(json.loads(line)["response"]["body"]) for line in content.splitlines()]


@pytest.mark.parametrize("endpoint", ENDPOINTS[:3])
def test_batch_lines_share_prefixes_only_with_their_own_key(separate_caches_server: Server, endpoint: str) -> None:
    text = f"{endpoint[4:6]} of a batch"
    bodies = [body_of(endpoint, text)]
    assert run_batch(separate_caches_server, endpoint, bodies, ONE) == [0]
    whole = cached(separate_caches_server, endpoint, text, ONE)
    assert whole > 0
    assert run_batch(separate_caches_server, endpoint, bodies, ONE) == [whole]
    assert run_batch(separate_caches_server, endpoint, bodies, OTHER) == [0]
    assert run_batch(separate_caches_server, endpoint, [bodies[0] | SALT], OTHER) == [0]
    assert cached(separate_caches_server, endpoint, text, OTHER, **SALT) == whole


@pytest.mark.parametrize("endpoint", [one for one in ENDPOINTS if one != "/v1/messages"])  # its errors differ
@pytest.mark.parametrize("salt", ["", "x" * 1025, 5])
def test_invalid_cache_salt_gets_400_naming_cache_salt(server: Server, endpoint: str, salt: object) -> None:
    answer = server.call("POST", endpoint, body_of(endpoint, "bad") | {"cache_salt": salt})
    assert (answer.status, answer.error()["param"]) == (400, "cache_salt")


def test_null_cache_salt_means_no_salt(server: Server) -> None:
    assert cached(server, "/v1/completions", "null", {}) == 0
    assert cached(server, "/v1/completions", "null", {}, cache_salt=None) > 0

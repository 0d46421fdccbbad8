"""Batches for tests: their input files, and what must hold of the files that come of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

NAME = "tiny"
Line = dict[str, object]


def completion_line(number: int, **fields: object) -> Line:
    """A line that asks for a few tokens, always the same ones."""
    body = {"model": NAME, "prompt": [number % 200 + 1, 5], "max_tokens": 3, "temperature": 0, **fields}
    return {"custom_id": f"line {number}", "method": "POST", "url": "/v1/completions", "body": body}


def chat_line(number: int, **fields: object) -> Line:
    """The same of a conversation."""
    messages = [{"role": "user", "content": f"the {number} dogs"}]
    body = {"model": NAME, "messages": messages, "max_tokens": 3, "temperature": 0, **fields}
    return {"custom_id": f"line {number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def jsonl(lines: Iterable[Line]) -> bytes:
    """Lines as a file holds them."""
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def read_jsonl(data: bytes) -> list[Line]:
    """The lines of a file that ends with a line's end, or is empty."""
    assert data == b"" or data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


def custom_ids(lines: Iterable[Line]) -> list[object]:
    """Their custom ids, in order."""
    return [line["custom_id"] for line in lines]


def assert_each_once(lines: Sequence[Line], *files: bytes) -> None:
    """Every line of the input is in one of the files, once, and each file is in the order of the input."""
    asked = custom_ids(lines)
    place = {name: index for index, name in enumerate(asked)}
    found: list[object] = []
    for data in files:
        names = custom_ids(read_jsonl(data))
        assert [place[str(name)] for name in names] == sorted(place[str(name)] for name in names)
        found += names
    assert len(found) == len(set(map(str, found))), "a line is answered twice"
    assert sorted(map(str, found)) == sorted(map(str, asked))

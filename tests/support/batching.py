"""Make input files of batches, and check their output files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

NAME = "tiny"
Line = dict[str, object]


def completion_line(number: int, **fields: object) -> Line:
    """Return a batch line for a completion of a few greedy tokens."""
    body = {"model": NAME, "prompt": [number % 200 + 1, 5], "max_tokens": 3, "temperature": 0, **fields}
    return {"custom_id": f"line {number}", "method": "POST", "url": "/v1/completions", "body": body}


def chat_line(number: int, **fields: object) -> Line:
    """Return a batch line for a chat completion of a few greedy tokens."""
    messages = [{"role": "user", "content": f"the {number} dogs"}]
    body = {"model": NAME, "messages": messages, "max_tokens": 3, "temperature": 0, **fields}
    return {"custom_id": f"line {number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def jsonl(lines: Iterable[Line]) -> bytes:
    """Return the lines as the content of a JSONL file."""
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def read_jsonl(data: bytes) -> list[Line]:
    """Return the lines of a JSONL file, which must be empty or end with a newline."""
    assert data == b"" or data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


def custom_ids(lines: Iterable[Line]) -> list[object]:
    """Return the custom ids of the lines, in order."""
    return [line["custom_id"] for line in lines]


def assert_each_once(lines: Sequence[Line], *files: bytes) -> None:
    """Check that the files answer every input line exactly once, each file in input order."""
    asked = custom_ids(lines)
    place = {name: index for index, name in enumerate(asked)}
    found: list[object] = []
    for data in files:
        names = custom_ids(read_jsonl(data))
        assert [place[str(name)] for name in names] == sorted(place[str(name)] for name in names)
        found += names
    assert len(found) == len(set(map(str, found))), "a line is answered twice"
    assert sorted(map(str, found)) == sorted(map(str, asked))

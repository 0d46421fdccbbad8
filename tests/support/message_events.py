"""Put the events of a streamed answer of /v1/messages together, as a client does, and check their order."""

from __future__ import annotations

import json
from typing import Any


def events_of(body: bytes) -> list[dict[str, Any]]:
    """Return the data of the server-sent events, each of which is named by its type."""
    *blocks, rest = body.decode().split("\n\n")
    assert rest == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


DELTAS = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}


def added_up(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a client makes of the events."""
    start, *rest, end, stop = events
    assert (start["type"], end["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    message: dict[str, Any] = start["message"]
    assert message["stop_reason"] is None
    assert message["content"] == []
    prompt = message["usage"]["input_tokens"]
    message["content"] = blocks_of(rest)
    message |= end["delta"] | {"usage": end["usage"]}
    assert message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"] == prompt
    return message


def blocks_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the blocks that the events between a message's start and end report, one after another."""
    blocks: list[dict[str, Any]] = []
    is_open, json_text = False, ""
    for event in events:
        assert event["index"] == len(blocks) - (event["type"] != "content_block_start")
        assert is_open == (event["type"] != "content_block_start")
        match event["type"]:
            case "content_block_start":
                blocks.append(event["content_block"])
                is_open = True
            case "content_block_delta":
                delta = event["delta"]
                if delta["type"] == "input_json_delta":
                    json_text += delta["partial_json"]
                else:
                    blocks[-1][DELTAS[delta["type"]]] += delta[DELTAS[delta["type"]]]
            case "content_block_stop":
                if blocks[-1]["type"] == "tool_use":
                    assert blocks[-1]["input"] == {}
                    blocks[-1]["input"], json_text = json.loads(json_text), ""
                is_open = False
    assert not is_open
    return blocks


def plain(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message without ids and cached tokens: the second time, the prompt is in the cache."""
    usage = dict(message["usage"])
    usage["input_tokens"] += usage.pop("cache_read_input_tokens")
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return message | {"id": "", "usage": usage, "content": content}

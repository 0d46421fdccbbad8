"""Queue limits per key and client priorities: no client shuts others out."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.patience import wait_until
from support.paused_engine import gated
from support.serving import Server, serving
from tok_core import InvalidField
from tok_server import Settings

LIMITED: dict[str, Any] = {
    "max_connections": 24,
    "max_header": 2048,
    "max_body": 400_000,
    "max_bodies": 500_000,
    "max_n": 8,
    "max_queued": 4,
    "header_timeout": 1.0,
    "body_timeout": 1.0,
    "write_timeout": 2.0,
    "idle_timeout": 3.0,
    "request_timeout": 60.0,
}
PATIENT = LIMITED | {"body_timeout": 60.0, "write_timeout": 60.0, "idle_timeout": 60.0}
MULTIPART = {"Content-Type": "multipart/form-data; boundary=x"}
UPLOAD = (
    b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
)


def test_key_that_fills_the_queue_does_not_block_other_keys(tiny_model: Path) -> None:
    first, second = ({"Authorization": f"Bearer {key}"} for key in ("first", "second"))
    fields = {"model": "tiny", "prompt": "one", "max_tokens": 100, "n": 8, "ignore_eos": True}

    def ask(headers: dict[str, str]) -> int:
        return server.call("POST", "/v1/completions", fields, headers).status

    with (
        serving(tiny_model, api_keys=("first", "second"), max_queued=4, engine_options={"max_running": 8}) as server,
        ThreadPoolExecutor(16) as pool,
        gated(server.engine) as gate,
    ):
        asked = [pool.submit(ask, first) for _ in range(8)]
        wait_until(lambda: any(one.done() for one in asked) and server.context.waiting >= 4)
        assert ask(first) == 429
        late = pool.submit(ask, second)
        wait_until(lambda: late.done() or len(server.context.open_prompts) == 2)
        gate.open()
        assert late.result() == 200
        assert {one.result() for one in asked} == {200, 429}
    assert not server.context.open_prompts


@pytest.mark.parametrize(("asked", "status"), [(-(2**63), 400), (-1, 400), (2**31, 400), (2**31 - 1, 200), (0, 200)])
def test_client_priority_outside_the_allowed_range_gets_400(server: Server, asked: int, status: int) -> None:
    answer = server.complete(prompt="one", max_tokens=1, priority=asked)
    assert answer.status == status
    if status == 400:
        assert answer.error()["param"] == "priority"
        assert "allowed: integers from " in str(answer.error()["message"])


def test_min_client_priority_sets_the_lowest_allowed_priority(tiny_model: Path) -> None:
    with serving(tiny_model, min_client_priority=-3) as server:
        assert server.complete(prompt="one", max_tokens=1, priority=-3).status == 200
        assert server.chat(messages=[{"role": "user", "content": "one"}], priority=-4).status == 400
    with pytest.raises(InvalidField, match="min_client_priority"):
        Settings(model_name="m", min_client_priority=1 << 31)

"""Run SkyRL's client of inference servers: `python tests/support/conformance_skyrl.py URL`.

URL serves the demo model with --enable-rl --enable-sleep-mode; docs/clients.md has the commands. Each check fails with
an AssertionError.
"""

from __future__ import annotations

import asyncio
import sys
import typing

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # skyrl is for Python 3.12, where pydantic accepts it

from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (  # noqa: E402
    RemoteInferenceClient,
)

PROMPT = [5, 6, 7]


async def main(url: str) -> None:
    """Sample, pause, sleep, and call the methods around an update of weights."""
    client = RemoteInferenceClient(proxy_url=url, server_urls=[url], data_parallel_size=1, model_name="demo")
    assert await client.get_world_size() == (1, 1)
    sampling = {"max_tokens": 4, "logprobs": 1, "temperature": 1.0}
    batch = {
        "prompt_token_ids": [PROMPT, PROMPT],
        "sampling_params": sampling,
        "session_ids": ["a", "b"],
        "cache_salt": "1",
    }
    found = await client.generate(batch)
    assert len(found["responses"]) == 2
    for ids, logprobs in zip(found["response_ids"], found["response_logprobs"], strict=True):
        assert 1 <= len(ids) == len(logprobs) <= 4
    body = {"prompt": {"chunks": [{"tokens": PROMPT}]}, "num_samples": 2, "sampling_params": {"max_tokens": 3}}
    drawn = await client.sample({"json": {**body, "include_prompt_logprobs": True, "topk_prompt_logprobs": 2}})
    assert len(drawn["sequences"]) == 2
    assert [one is None for one in drawn["prompt_logprobs"]] == [True, False, False]
    chat = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "session_id": "a"}
    assert (await client.chat_completion({"json": chat}))["choices"]
    for calls in ((client.pause(), client.resume()), (client.sleep(level=2), client.wake_up(tags=["weights"]))):
        for call in calls:
            assert (await call)[url]["status"] == 200
    for call in (client.start_weight_update(), client.finish_weight_update()):
        assert (await call)[url]["body"] == {"results": [None]}
    for call in (client.wake_up(tags=["kv_cache"]), client.reset_prefix_cache()):
        assert (await call)[url]["status"] == 200
    await client.teardown()
    print("passed")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

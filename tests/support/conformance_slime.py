"""Run slime's engine of a server that was started outside: `python tests/support/conformance_slime.py URL MODEL`.

URL serves the model of the directory MODEL with --enable-rl --enable-sleep-mode; docs/clients.md has the commands. Each
check fails with an AssertionError.
"""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlparse

from slime.backends.sglang_utils.external import get_server_info
from slime.backends.sglang_utils.server_control import abort_server_until_idle
from slime.backends.sglang_utils.sglang_engine import SGLangEngine
from slime.utils import http_utils


def main(url: str, model: str) -> None:
    """Pause, load weights, continue, give memory back and take it again; generate and abort."""
    address = urlparse(url)
    assert get_server_info(url)["tp_size"] == 1
    engine: Any = object.__new__(SGLangEngine)  # its constructor is for the actor of Ray that starts SGLang
    engine.args, engine.node_rank = SimpleNamespace(rollout_external=True), 0
    engine.server_host, engine.server_port = address.hostname, address.port
    assert engine.health_generate(60)
    engine.flush_cache()
    assert engine.pause_generation().json()["status"] == "ok"
    assert engine.update_weights_from_disk(model, weight_version="3")["success"]
    assert engine.continue_generation().json()["status"] == "ok"
    assert engine.get_weight_version() == "3"
    engine.destroy_weights_update_group("never joined")
    engine.release_memory_occupation()
    for tag in ("weights", "kv_cache", "cuda_graph"):
        engine.resume_memory_occupation([tag])
    http_utils.init_http_client(
        SimpleNamespace(
            rollout_num_gpus=1, rollout_num_gpus_per_engine=1, sglang_server_concurrency=4, use_distributed_post=False
        )
    )
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 3}, "return_logprob": True}
    info = asyncio.run(http_utils.post(f"{url}/generate", body))["meta_info"]
    assert info["weight_version"] == "3"
    assert len(info["output_token_logprobs"]) == info["completion_tokens"]
    asyncio.run(abort_server_until_idle(url))
    print("passed")


if __name__ == "__main__":
    main(*sys.argv[1:])

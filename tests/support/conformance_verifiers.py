"""Run verifiers' client of trainers: `python tests/support/conformance_verifiers.py URL MODEL`.

URL serves the model of the directory MODEL with --enable-rl; docs/clients.md has the commands. prime-rl samples by this
client. Each check fails with an AssertionError.
"""

from __future__ import annotations

import asyncio
import math
import sys

from verifiers.v1.clients.train import TrainClient
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.errors import ProviderError
from verifiers.v1.types import Response, SamplingConfig

QUESTION = "Tom buys 4 books for 12 dollars each and 3 pens for 5 dollars each. How much does he spend in all?"
NAME = "demo"


async def ask(client: TrainClient, question: str, **sampling: object) -> Response:
    """Return a sampled answer to a question, with the tokens that training needs."""
    body = {"model": NAME, "messages": [{"role": "user", "content": question}]}
    return await client.get_response(ChatDialect(), body, SamplingConfig(**sampling), session_id="a")


async def main(url: str, model: str) -> None:
    """Sample, with and without a limit and with a salt of the cache; ask more than the model can read."""
    config = TrainClientConfig(base_url=f"{url}/v1", api_key_var="NONE", renderer_model_name=model)
    client = TrainClient(config)
    try:
        answer = await ask(client, QUESTION, temperature=0)
        assert str(answer.message.content).endswith("#### 63"), answer
        assert answer.finish_reason == "stop"
        short = await ask(client, QUESTION, temperature=1.0, top_p=1.0, max_tokens=5, cache_salt="1")
        assert short.finish_reason == "length"
        for one in (answer, short):
            assert one.tokens is not None
            assert one.usage is not None
            assert one.usage.prompt_tokens == len(one.tokens.prompt_ids)
            assert one.usage.completion_tokens == len(one.tokens.completion_ids) == len(one.tokens.completion_logprobs)
            assert all(math.isfinite(logprob) and logprob <= 0 for logprob in one.tokens.completion_logprobs)
        try:
            await ask(client, QUESTION * 100)
        except ProviderError as error:
            refusal = str(error)
        assert "exceeds maximum context length" in refusal, refusal
    finally:
        await client.close()
    print("passed")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

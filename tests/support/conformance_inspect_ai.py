"""Run inspect-ai as a client: `python tests/support/conformance_inspect_ai.py URL DIR` writes its logs into DIR.

inspect-ai needs a newer openai-python than LiteLLM allows, so it has an environment of its own; docs/clients.md has the
command. Each check fails with an AssertionError.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any, Literal

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageUser, GenerateConfig, Model, ResponseSchema, execute_tools, get_model
from inspect_ai.scorer import pattern
from inspect_ai.solver import generate
from inspect_ai.tool import ToolDef
from inspect_ai.util import json_schema
from pydantic import BaseModel

QUESTION = "Tom buys 4 books for 12 dollars each and 3 pens for 5 dollars each. How much does he spend in all?"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 100}


class Purchase(BaseModel):
    """A purchase."""

    buyer: Literal["Tom", "Ann"]
    thing: Literal["books", "pens"]
    dear: bool


async def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def model(name: str, url: str, **more: Any) -> Model:
    """Return a client of the server's model by one of inspect-ai's providers."""
    config = GenerateConfig(max_retries=0, **GREEDY)
    return get_model(f"{name}/demo", base_url=f"{url}/v1", api_key="none", config=config, memoize=False, **more)


def evaluate(client: Model, directory: Path) -> None:
    """Score two samples of one question: the first target is right, the second is wrong."""
    samples = [Sample(input=QUESTION, target=target) for target in ("63", "64")]
    task = Task(dataset=samples, solver=generate(), scorer=pattern(r"#### (\d+)"))
    (log,) = eval(task, model=client, display="none", log_dir=str(directory), fail_on_error=True)
    assert log.status == "success", log.error
    assert log.results is not None
    assert log.results.scores[0].metrics["accuracy"].value == 0.5
    (usage,) = log.stats.model_usage.values()
    assert usage.output_tokens == 2 * 53


async def ask(client: Model) -> None:
    """Call a tool and continue with its result, parse an object, read log-probabilities, exceed the model's length."""
    tool = ToolDef(weather, parameters={"city": "The city."})
    alone = GenerateConfig(parallel_tool_calls=False)
    called = await client.generate(QUESTION, tools=[tool], tool_choice="any", config=alone)
    assert called.stop_reason == "tool_calls"
    done = await execute_tools([ChatMessageUser(content=QUESTION), called.message], [tool])
    (result,) = done.messages
    assert result.text.startswith("sunny in ")
    messages = [ChatMessageUser(content=QUESTION), called.message, result]
    assert (await client.generate(messages, tools=[tool])).completion
    schema = ResponseSchema(name="purchase", json_schema=json_schema(Purchase), strict=True)
    typed = await client.generate(QUESTION, config=GenerateConfig(response_schema=schema))
    Purchase.model_validate_json(typed.completion)
    valued = await client.generate(QUESTION, config=GenerateConfig(logprobs=True, top_logprobs=2))
    assert valued.choices[0].logprobs is not None
    assert len(valued.choices[0].logprobs.content[0].top_logprobs or ()) == 2
    assert (await client.generate(QUESTION * 100)).stop_reason == "model_length"


def main(url: str, directory: Path) -> None:
    """Run all checks with the chat-completions and the responses API."""
    providers: tuple[tuple[str, dict[str, Any]], ...] = (
        ("openai", {"responses_api": False}),
        ("openai", {"responses_api": True}),
        ("vllm", {}),
    )
    for name, more in providers:
        client = model(name, url, **more)
        evaluate(client, directory)
        asyncio.run(ask(model(name, url, **more)))
        print(f"{name} {more}: all checks passed", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

"""Lets the model call a function, and gives it the result until it answers in words.

python tools.py http://127.0.0.1:10210/v1 "What is the weather in Paris?"
"""

from __future__ import annotations

import asyncio
import json
import sys

from tok_client import AsyncClient
from tok_client.types import (
    ChatMessage,
    FunctionDefinition,
    FunctionTool,
    FunctionToolCall,
    Message,
    ToolMessage,
    UserMessage,
)

ROUNDS = 4
WEATHER = FunctionTool(
    function=FunctionDefinition(
        name="weather",
        description="The weather in a city.",
        parameters={"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    )
)


def weather(city: str) -> str:
    """What the model gets to know."""
    return json.dumps({"city": city, "weather": "sunny"})


async def main(url: str, question: str) -> None:
    """Prints what the model calls, and its answer."""
    messages: list[Message | ChatMessage] = [UserMessage(content=question)]
    async with AsyncClient(url) as client:
        model = (await client.models.list()).data[0].id
        for _ in range(ROUNDS):
            asked = await client.chat.completions.create(model=model, messages=messages, tools=[WEATHER])
            said = asked.choices[0].message
            if not said.tool_calls:
                print(said.content)
                return
            messages.append(said)
            for call in said.tool_calls:
                assert isinstance(call, FunctionToolCall)
                print(call.function.name, call.function.arguments)
                result = weather(**json.loads(call.function.arguments))
                messages.append(ToolMessage(content=result, tool_call_id=call.id))
    print(f"no answer after {ROUNDS} rounds")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

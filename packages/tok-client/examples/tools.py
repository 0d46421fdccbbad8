"""Let the model call a function, and send it the results until it answers in words.

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

MAX_ROUNDS = 4
WEATHER = FunctionTool(
    function=FunctionDefinition(
        name="weather",
        description="The weather in a city.",
        parameters={"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    )
)


def weather(city: str) -> str:
    """Return the weather in a city as JSON text, which the model reads."""
    return json.dumps({"city": city, "weather": "sunny"})


async def main(url: str, question: str) -> None:
    """Print the model's tool calls and its answer."""
    messages: list[Message | ChatMessage] = [UserMessage(content=question)]
    async with AsyncClient(url) as client:
        model = (await client.models.list()).data[0].id
        for _ in range(MAX_ROUNDS):
            completion = await client.chat.completions.create(model=model, messages=messages, tools=[WEATHER])
            message = completion.choices[0].message
            if not message.tool_calls:
                print(message.content)
                return
            messages.append(message)
            for call in message.tool_calls:
                assert isinstance(call, FunctionToolCall)
                print(call.function.name, call.function.arguments)
                result = weather(**json.loads(call.function.arguments))
                messages.append(ToolMessage(content=result, tool_call_id=call.id))
    print(f"no answer after {MAX_ROUNDS} rounds")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

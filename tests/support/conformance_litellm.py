"""Run LiteLLM as a client in a process of its own, since it leaves event loops open.

`python -m support.conformance_litellm URL` reads {"question": …, "format": a response_format, "tool": a function} from
its input and prints a JSON object with the result of each call.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from support.conformance import NAME


def main(url: str, question: str, response_format: dict[str, Any], tool: dict[str, Any]) -> None:
    """Print the results of all calls."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # set before the import, so that nothing is downloaded
    import litellm

    told: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": "none", "timeout": 240, "max_retries": 0}
    messages = [{"role": "user", "content": question}]
    asked = {"model": f"openai/{NAME}", "messages": messages, "temperature": 0, **told}
    whole = litellm.completion(**asked)
    parts = list(litellm.completion(**asked, stream=True))
    later = asyncio.run(litellm.acompletion(**asked))
    structured = litellm.completion(**asked, response_format=response_format)
    tools = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    called = litellm.completion(**asked, **tools)
    calling = litellm.stream_chunk_builder(list(litellm.completion(**asked, **tools, stream=True)))
    told_of = {"role": "tool", "tool_call_id": called.choices[0].message.tool_calls[0].id, "content": "sunny"}
    goes_on = [*messages, called.choices[0].message.model_dump(exclude_none=True), told_of]
    after = litellm.completion(**{**asked, "messages": goes_on}, tools=[tool], max_tokens=5)
    text = litellm.text_completion(model=f"text-completion-openai/{NAME}", prompt="Question:", max_tokens=4, **told)
    vectors = litellm.embedding(model=f"openai/{NAME}", input=["a", "b"], **told)
    try:
        refused = str(litellm.completion(**{**asked, "messages": [{"role": "user", "content": question * 100}]}))
    except litellm.ContextWindowExceededError as error:  # on which LiteLLM falls back to a model with a longer context
        refused = f"{type(error).__name__}: {error}"
    found = {
        "whole": whole.choices[0].message.content,
        "tokens": whole.usage.completion_tokens,
        "parts": [part.choices[0].delta.content or "" for part in parts],
        "later": later.choices[0].message.content,
        "structured": structured.choices[0].message.content,
        "calls": [one.choices[0].message.tool_calls[0].function.model_dump() for one in (called, calling)],
        "after": after.choices[0].message.content,
        "text": text.choices[0].text,
        "refused": refused,
        "vectors": [one["embedding"] for one in vectors.data],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    given = json.load(sys.stdin)
    main(sys.argv[1], given["question"], given["format"], given["tool"])

"""Run guidance as a client: `python tests/support/conformance_guidance.py URL`; docs/clients.md has the command.

Each check fails with an AssertionError.
"""

from __future__ import annotations

import sys
from typing import Any, Literal

import guidance
from guidance.models import OpenAI
from pydantic import BaseModel

QUESTION = "Tom buys 4 books for 12 dollars each and 3 pens for 5 dollars each. How much does he spend in all?"


class Purchase(BaseModel):
    """A purchase."""

    buyer: Literal["Tom", "Ann"]
    thing: Literal["books", "pens"]
    dear: bool


def answer(url: str, grammar: Any) -> str:
    """Return what the model generates as "answer" after the question."""
    state: Any = OpenAI("demo", base_url=f"{url}/v1", api_key="none", echo=False)
    with guidance.user():
        state += QUESTION
    with guidance.assistant():
        state += grammar
    # If a chunk has several tokens, guidance joins the texts of their log-probabilities, which include the end token.
    return str(state["answer"]).removesuffix("<|eot_id|>")


def main(url: str) -> None:
    """Generate text, text up to a limit, and an object that follows a schema."""
    assert answer(url, guidance.gen("answer", temperature=0)).endswith("#### 63")
    assert answer(url, guidance.gen("answer", temperature=0, max_tokens=3)) == "The books cost"
    Purchase.model_validate_json(answer(url, guidance.json("answer", schema=Purchase, max_tokens=60)))
    print("all checks passed")


if __name__ == "__main__":
    main(sys.argv[1])

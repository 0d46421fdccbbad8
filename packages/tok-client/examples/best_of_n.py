"""Sample one problem until a majority is certain, and estimate pass@k; the server must know `stop_when`.

python best_of_n.py http://127.0.0.1:10210/v1 "What is 6 times 7?" 42
"""

from __future__ import annotations

import re
import sys

from tok_client import Client, majority, pass_at_k
from tok_client.types import Majority

NUMBER = r"(\d+)"


def answer_of(text: str) -> str | None:
    """Return the last number of a sample's text."""
    numbers = re.findall(NUMBER, text)
    return numbers[-1] if numbers else None


def main(url: str, problem: str, right: str) -> None:
    """Print the majority's answer, the number of finished samples, and pass@k for the answer `right`."""
    with Client(url) as client:
        completion = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": problem}],
            n=64,
            temperature=1,
            max_tokens=64,
            stop_when=Majority(margin=8, pattern=NUMBER),
        )
    finished = [choice for choice in completion.choices if choice.finish_reason != "stop_when"]
    answers = [answer_of(choice.message.content or "") for choice in finished]
    print(f"{len(finished)} of 64 samples say {majority(answers)}")
    for k in (1, 4, 16):
        if k <= len(answers):
            print(f"pass@{k}: {pass_at_k(len(answers), answers.count(right), k):.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])

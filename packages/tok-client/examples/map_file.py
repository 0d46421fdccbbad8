"""Answer a file of prompts, one per line, into a file of answers; a further run resumes a stopped one.

python map_file.py http://127.0.0.1:10210/v1 prompts.txt answers.jsonl
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from tok_client import Client, Completion, read_answers


def prompts(path: str) -> Iterator[str]:
    """Yield the lines of the file, read as they are needed."""
    with open(path, encoding="utf-8") as file:
        for line in file:
            yield line.rstrip("\n")


def main(url: str, source: str, target: str) -> None:
    """Write the answers to all prompts in `source` to `target`, and print them."""
    with Client(url) as client:
        model = client.models.list().data[0].id
        run = client.completions.map(
            prompts(source),
            model=model,
            max_tokens=32,
            temperature=0,
            concurrency=512,
            ordered=False,
            output=target,
            on_error="return",
            progress=True,
        )
        for result in run:
            if result.error is not None:
                print(f"line {result.index + 1}: {result.error}", file=sys.stderr)
    for saved in read_answers(target, Completion):
        print(saved.index, saved.answer.choices[0].text)


if __name__ == "__main__":
    main(*sys.argv[1:])

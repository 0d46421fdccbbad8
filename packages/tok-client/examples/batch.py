"""Sends a file of requests as a batch, waits for it, and fetches its answers.

python batch.py http://127.0.0.1:10210/v1 requests.jsonl answers.jsonl
"""

from __future__ import annotations

import sys

from tok_client import Client


def main(url: str, source: str, target: str) -> None:
    """Answers the requests in `source`, all to /v1/completions, into `target`."""
    with Client(url) as client:
        file = client.files.create(file=source)
        begun = client.batches.create(input_file_id=file.id, endpoint="/v1/completions")
        done = client.batches.wait(begun.id, poll=0.5)
        print(done.status, done.request_counts)
        if done.output_file_id:
            client.files.save(done.output_file_id, target)
        if done.error_file_id:
            print(client.files.content(done.error_file_id).decode())


if __name__ == "__main__":
    main(*sys.argv[1:])

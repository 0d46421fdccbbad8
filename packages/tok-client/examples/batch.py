"""Send a file of requests as a batch, wait for its end, and fetch its answers.

python batch.py http://127.0.0.1:10210/v1 requests.jsonl answers.jsonl
"""

from __future__ import annotations

import sys

from tok_client import Client


def main(url: str, source: str, target: str) -> None:
    """Write the answers to the requests in `source`, all to /v1/completions, to `target`."""
    with Client(url) as client:
        file = client.files.create(file=source)
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions")
        batch = client.batches.wait(batch.id, poll=0.5)
        print(batch.status, batch.request_counts)
        if batch.output_file_id:
            client.files.save(batch.output_file_id, target)
        if batch.error_file_id:
            print(client.files.content(batch.error_file_id).decode())


if __name__ == "__main__":
    main(*sys.argv[1:])

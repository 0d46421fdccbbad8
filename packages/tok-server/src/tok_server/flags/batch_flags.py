"""Flags of `tok batch`."""

from __future__ import annotations

import argparse

from tok_server.flags.engine_flags import add_engine_flags
from tok_server.flags.server_flags import add_formats

BATCH_EXAMPLES = """examples:
  tok batch questions.jsonl -o answers.jsonl --model Qwen/Qwen2.5-0.5B-Instruct
  tok batch questions.jsonl -o answers.jsonl     again after an interruption: goes on where it was
  tok batch questions.jsonl -o answers.jsonl --retry-failed

a line of the input, and what its line of the output holds (the shape of OpenAI's batches):
  {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "One, two,", "max_tokens": 8}}
  {"id": "batch_req_…", "custom_id": "1", "response": {"status_code": 200, …, "body": {…}}, "error": null}

exit codes: 0 all lines answered, 1 some failed or nothing was run, 2 bad flags or input, 130 interrupted
"""


def add_batch(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tok batch`."""
    parser.add_argument("file", metavar="FILE.jsonl", help="requests, one a line")
    parser.add_argument(
        "-o", "--output", required=True, metavar="OUT.jsonl", help="answers, in the order of the requests"
    )
    parser.add_argument("--model", metavar="MODEL", help="a directory or a hub id (default: the demo model)")
    parser.add_argument(
        "--retry-failed", action="store_true", help="answer those lines anew that failed in a finished OUT.jsonl"
    )
    add_formats(parser.add_argument_group("markup"))
    add_engine_flags(parser.add_argument_group("engine, as of tok serve"))

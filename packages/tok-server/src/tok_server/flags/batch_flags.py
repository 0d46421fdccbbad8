"""Flags of `tok batch`."""

from __future__ import annotations

import argparse

from tok_server.flags.engine_flags import add_engine_flags
from tok_server.flags.server_flags import add_formats

BATCH_EXAMPLES = """examples:
  tok batch questions.jsonl -o answers.jsonl --model Qwen/Qwen2.5-0.5B-Instruct
  tok batch questions.jsonl -o answers.jsonl     run again: resumes an interrupted run
  tok batch questions.jsonl -o answers.jsonl --retry-failed

an input line and its output line, in the format of OpenAI's batch API:
  {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "One, two,", "max_tokens": 8}}
  {"id": "batch_req_…", "custom_id": "1", "response": {"status_code": 200, …, "body": {…}}, "error": null}

exit codes: 0 all lines answered, 1 some failed or nothing was run, 2 invalid flags or input, 130 interrupted
"""


def add_batch(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tok batch`."""
    parser.add_argument("file", metavar="FILE.jsonl", help="file of requests, one per line")
    parser.add_argument(
        "-o", "--output", required=True, metavar="OUT.jsonl", help="file for the answers, in the order of the requests"
    )
    parser.add_argument(
        "--model", metavar="MODEL", help="a directory or a Hugging Face hub id (default: the demo model)"
    )
    parser.add_argument(
        "--retry-failed", action="store_true", help="answer the failed lines of a finished OUT.jsonl again"
    )
    add_formats(parser.add_argument_group("tool calls and reasoning"))
    add_engine_flags(parser.add_argument_group("engine, as in tok serve"))

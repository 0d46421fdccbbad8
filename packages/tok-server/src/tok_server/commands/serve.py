"""`tok serve`: run the server and print a line once it is ready."""

from __future__ import annotations

import argparse
import ipaddress
import json
import logging
import sys

from tok_core import AsyncEngine
from tok_core.runtime import TEXT_FORMAT, JsonFormatter
from tok_server.flags import engine_config, server_settings
from tok_server.http import run
from tok_server.serve import ServeError, serve
from tok_server.settings import Settings

QUESTION = "Tom buys 4 books for 12 dollars each and 3 pens for 5 dollars each. How much does he spend in all?"


def main(options: argparse.Namespace) -> int:
    """Serve until stopped. Errors: InvalidField, TokError."""
    config, settings = engine_config(options), server_settings(options)
    log_to_stderr(options.log_level, options.log_format)

    def announce(engine: AsyncEngine, port: int) -> None:
        print(ready_lines(engine, settings, port), flush=True)

    try:
        run(serve(config, settings, announce), tls=settings.tls_cert is not None)
    except ServeError as error:
        print(f"tok serve: error: {error}", file=sys.stderr)
        return 1
    return 0


def ready_lines(engine: AsyncEngine, settings: Settings, port: int) -> str:
    """Return the line with the server's address, and a curl command to paste."""
    url = f"{'https' if settings.tls_cert else 'http'}://{_reachable(settings.host)}:{port}"
    path, members = _example(engine)
    body = json.dumps({"model": settings.model_name, "temperature": 0, **members})
    key = "" if not settings.api_keys else " -H 'Authorization: Bearer YOUR_KEY'"
    info = engine.info
    count = len(engine.health().replicas)
    replicas = f", {count} replicas" if count > 1 else ""
    return (
        f"tok is ready: {settings.model_name} ({info.dtype} on {info.device}{replicas}) at {url}/v1\n"
        f"curl {url}{path}{key} -H 'Content-Type: application/json' -d '{body}'"
    )


def _example(engine: AsyncEngine) -> tuple[str, dict[str, object]]:
    if engine.tokenizer is None:
        return "/v1/completions", {"prompt": [0], "return_token_ids": True}
    if engine.chat_template is None:
        return "/v1/completions", {"prompt": QUESTION}
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": QUESTION}]}


def _reachable(host: str) -> str:
    """Return the host as a URL needs it; an unspecified address such as 0.0.0.0 becomes 127.0.0.1."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.is_unspecified:
        return "127.0.0.1"
    return f"[{address}]" if address.version == 6 else str(address)


def log_to_stderr(level: str, log_format: str) -> None:
    """Send the log of this process, and of the processes it starts, to standard error, as "text" or "json"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else logging.Formatter(TEXT_FORMAT))
    logging.basicConfig(handlers=[handler])
    for name in ("tok", "tok_core", "tok_server"):
        logging.getLogger(name).setLevel(level.upper())

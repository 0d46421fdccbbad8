"""Write the log as lines of text or JSON objects; both identify a request by its id."""

from __future__ import annotations

import logging
import sys

from tok_core.runtime import FIELDS, TEXT, JsonFormatter

__all__ = ["FIELDS", "log_to_stderr"]


def log_to_stderr(level: str, log_format: str) -> None:
    """Send the log of this process, and of the processes it starts, to standard error, as "text" or "json"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else logging.Formatter(TEXT))
    logging.basicConfig(handlers=[handler])
    for name in ("tok", "tok_core", "tok_server"):
        logging.getLogger(name).setLevel(level.upper())

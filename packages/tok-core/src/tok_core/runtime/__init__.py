"""Utilities of every process: heartbeat, lifeline to the parent, log format, scratch directories, garbage collector."""

from __future__ import annotations

from tok_core.runtime.garbage_collection import settle
from tok_core.runtime.heartbeat import HEARTBEAT, TURN
from tok_core.runtime.lifeline import close_in_forks
from tok_core.runtime.log_format import FIELDS, TEXT, JsonFormatter, is_json, set_format
from tok_core.runtime.scratch_directory import ScratchDirectory
from tok_core.runtime.trace_paths import trace_file, trace_files

__all__ = [
    "FIELDS",
    "HEARTBEAT",
    "TEXT",
    "TURN",
    "JsonFormatter",
    "ScratchDirectory",
    "close_in_forks",
    "is_json",
    "set_format",
    "settle",
    "trace_file",
    "trace_files",
]

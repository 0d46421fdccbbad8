"""Utilities of every process: heartbeat, lifeline to the parent, log format, scratch directories, free memory."""

from __future__ import annotations

from tok_core.runtime.garbage_collection import settle
from tok_core.runtime.heartbeat import HEARTBEAT, TURN
from tok_core.runtime.host_memory import available_memory, memory_of_siblings
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
    "available_memory",
    "close_in_forks",
    "is_json",
    "memory_of_siblings",
    "set_format",
    "settle",
    "trace_file",
    "trace_files",
]

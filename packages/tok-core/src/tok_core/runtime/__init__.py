"""Utilities of processes: heartbeat, lifeline to the parent, log format, scratch directories, free memory, compiler."""

from __future__ import annotations

from tok_core.runtime.compiler_process import MANIFEST, START_MARKER, is_first_start, start_compiler
from tok_core.runtime.garbage_collection import freeze_gc_heap, pause_gc
from tok_core.runtime.heartbeat import HEARTBEAT, MAX_TURN_SECONDS
from tok_core.runtime.host_memory import available_memory, memory_of_siblings
from tok_core.runtime.lifeline import close_in_forks
from tok_core.runtime.log_format import EXTRA_FIELDS, TEXT_FORMAT, JsonFormatter, configure_logging, logs_json
from tok_core.runtime.own_thread import run_in_own_thread
from tok_core.runtime.scratch_directory import ScratchDirectory
from tok_core.runtime.trace_paths import trace_file, trace_files

__all__ = [
    "EXTRA_FIELDS",
    "HEARTBEAT",
    "MANIFEST",
    "MAX_TURN_SECONDS",
    "START_MARKER",
    "TEXT_FORMAT",
    "JsonFormatter",
    "ScratchDirectory",
    "available_memory",
    "close_in_forks",
    "configure_logging",
    "freeze_gc_heap",
    "is_first_start",
    "logs_json",
    "memory_of_siblings",
    "pause_gc",
    "run_in_own_thread",
    "start_compiler",
    "trace_file",
    "trace_files",
]

"""Storage of files, batches and answers: SQLite databases and plain files that survive any crash of the process."""

from __future__ import annotations

from tok_server.batch.storage.answers import Answers, LineAnswer, Totals
from tok_server.batch.storage.blobs import atomic_write
from tok_server.batch.storage.clock import Clock
from tok_server.batch.storage.database import StoreError, check_database, is_damage, is_full, remove_database
from tok_server.batch.storage.directory import DataDirectory, FileLock, Quota, QuotaExceeded
from tok_server.batch.storage.lines import (
    LINES_PER_STOP_CHECK,
    InputChanged,
    InputLine,
    Stopped,
    parse_known_line,
    parse_line,
    read_lines,
)
from tok_server.batch.storage.output_lines import (
    FinishedLine,
    UnansweredReason,
    encode_line_answer,
    line_answer,
    unanswered_line,
)
from tok_server.batch.storage.recovery import check_index, recover
from tok_server.batch.storage.states import CANCELLABLE_STATUSES
from tok_server.batch.storage.store import ENDED, NO_OWNER, FileInUse, RecordNotFound, Store, StoredJob
from tok_server.batch.storage.validation import MAX_ERRORS, check_digest, validate

__all__ = [
    "CANCELLABLE_STATUSES",
    "ENDED",
    "LINES_PER_STOP_CHECK",
    "MAX_ERRORS",
    "NO_OWNER",
    "Answers",
    "Clock",
    "DataDirectory",
    "FileInUse",
    "FileLock",
    "FinishedLine",
    "InputChanged",
    "InputLine",
    "LineAnswer",
    "Quota",
    "QuotaExceeded",
    "RecordNotFound",
    "Stopped",
    "Store",
    "StoreError",
    "StoredJob",
    "Totals",
    "UnansweredReason",
    "atomic_write",
    "check_database",
    "check_digest",
    "check_index",
    "encode_line_answer",
    "is_damage",
    "is_full",
    "line_answer",
    "parse_known_line",
    "parse_line",
    "read_lines",
    "recover",
    "remove_database",
    "unanswered_line",
    "validate",
]

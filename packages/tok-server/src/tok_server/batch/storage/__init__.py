"""Storage of files, batches and answers: SQLite databases and plain files that survive any crash of the process."""

from __future__ import annotations

from tok_server.batch.storage.answers import Answers, LineAnswer, Totals
from tok_server.batch.storage.blobs import durable
from tok_server.batch.storage.clock import Clock
from tok_server.batch.storage.database import StoreError, check_database, is_damage, is_full, remove_database
from tok_server.batch.storage.directory import DataDirectory
from tok_server.batch.storage.lines import (
    LOOK_EVERY,
    InputChanged,
    InputLine,
    Stopped,
    parse_known_line,
    parse_line,
    read_lines,
)
from tok_server.batch.storage.lock import FileLock
from tok_server.batch.storage.output_lines import FinishedLine, Unanswered, answer_of, unanswered, write
from tok_server.batch.storage.quota import Quota, QuotaExceeded
from tok_server.batch.storage.recovery import check_index, recover
from tok_server.batch.storage.states import BEFORE_THE_END
from tok_server.batch.storage.store import ENDED, NOBODY, InUse, Missing, Store, StoredJob
from tok_server.batch.storage.validation import MAX_ERRORS, check_digest, validate

__all__ = [
    "BEFORE_THE_END",
    "ENDED",
    "LOOK_EVERY",
    "MAX_ERRORS",
    "NOBODY",
    "Answers",
    "Clock",
    "DataDirectory",
    "FileLock",
    "FinishedLine",
    "InUse",
    "InputChanged",
    "InputLine",
    "LineAnswer",
    "Missing",
    "Quota",
    "QuotaExceeded",
    "Stopped",
    "Store",
    "StoreError",
    "StoredJob",
    "Totals",
    "Unanswered",
    "answer_of",
    "check_database",
    "check_digest",
    "check_index",
    "durable",
    "is_damage",
    "is_full",
    "parse_known_line",
    "parse_line",
    "read_lines",
    "recover",
    "remove_database",
    "unanswered",
    "validate",
    "write",
]

"""One SQLite file in WAL mode: what is committed is there after any death of the process.

A connection belongs to the thread that opened it. Writers give all of theirs to one thread.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from tok_core import TokError

Synchronous = Literal["FULL", "NORMAL"]
SIDE_FILES = ("", "-wal", "-shm", "-journal")


class StoreError(TokError):
    """A data directory, or a file in it, that cannot be used; the message names it and says what to do."""


def open_database(path: Path, schema: str, version: int, synchronous: Synchronous) -> sqlite3.Connection:
    """The file at `path`, made if it is missing.

    version      of `schema`; a file of another one is refused
    synchronous  FULL: a commit survives a loss of power, too. NORMAL: the last ones may be lost by it

    Errors: StoreError.
    """
    try:
        connection = sqlite3.connect(path, isolation_level=None)
    except sqlite3.Error as error:
        raise StoreError(f"{path}: cannot be opened: {error}") from error
    try:
        _prepare(connection, path, schema, version, synchronous)
    except BaseException as error:
        connection.close()
        if isinstance(error, sqlite3.Error):
            raise StoreError(f"{path}: cannot be used: {error}") from error
        raise
    return connection


def _prepare(connection: sqlite3.Connection, path: Path, schema: str, version: int, synchronous: Synchronous) -> None:
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {synchronous}")
    (found,) = connection.execute("PRAGMA user_version").fetchone()
    if found not in (0, version):
        raise StoreError(f"{path}: was written by another version of tok (format {found}, not {version})")
    with transaction(connection):
        for statement in filter(str.strip, schema.split(";")):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {version}")


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All of it or nothing."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):  # a full disk ends it by itself
            connection.execute("ROLLBACK")
        raise


def remove_database(path: Path) -> None:
    """Deletes the file and those that SQLite keeps beside it."""
    # The file itself last: as long as it is there, whoever clears up finds it.
    for side in reversed(SIDE_FILES):
        path.with_name(path.name + side).unlink(missing_ok=True)

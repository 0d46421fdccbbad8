"""Open SQLite files in WAL mode: committed data survives any crash of the process.

A connection belongs to the thread that opened it. One thread opens all connections that write.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Literal

from tok_core import TokError

Synchronous = Literal["FULL", "NORMAL"]
SIDE_FILES = ("", "-wal", "-shm", "-journal")
PRIVATE_FILE = 0o600
DAMAGE_CODES = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class StoreError(TokError):
    """A data directory, or a file in it, that cannot be used; the message names it and says what to do."""


class DamagedError(StoreError):
    """A database whose content is not what was written to it."""


def is_damage(error: BaseException | None) -> bool:
    """Return whether `error`, or its cause, means that a database is damaged: no retry can help."""
    if isinstance(error, DamagedError):
        return True
    if isinstance(error, StoreError):
        return is_damage(error.__cause__)
    return isinstance(error, sqlite3.Error) and _primary_code(error) in DAMAGE_CODES


def is_full(error: BaseException | None) -> bool:
    """Return whether `error`, or its cause, means that the disk or a quota is full: a retry may help."""
    if isinstance(error, StoreError):
        return is_full(error.__cause__)
    if isinstance(error, OSError):
        return error.errno in NO_SPACE
    if not isinstance(error, sqlite3.Error):
        return False
    # SQLite reports a full disk as an I/O error where it extends its shared-memory file.
    return _primary_code(error) == sqlite3.SQLITE_FULL or _code(error) == sqlite3.SQLITE_IOERR_SHMSIZE


def _code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) or 0


def _primary_code(error: sqlite3.Error) -> int:
    return _code(error) & 0xFF


def open_database(path: Path, schema: str, version: int, synchronous: Synchronous) -> sqlite3.Connection:
    """Return a connection to the database at `path`, created if missing, readable by its owner only.

    version      version of `schema`; a file of another version is refused
    synchronous  FULL: a commit survives a power loss, too. NORMAL: a power loss may lose the last commits

    Errors: StoreError.
    """
    try:
        make_private(path)
        connection = sqlite3.connect(path, isolation_level=None)
    except (OSError, sqlite3.Error) as error:
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
    check_version(connection, path, version)
    with transaction(connection):
        for statement in filter(str.strip, schema.split(";")):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {version}")


def check_version(connection: sqlite3.Connection, path: Path, version: int) -> None:
    """Raise StoreError unless the file is new or of this version."""
    found: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if found not in (0, version):
        raise StoreError(f"{path}: was written by another version of tok (format {found}, not {version})")


def make_private(path: Path) -> None:
    """Create the file at `path` if missing, and restrict access to its owner. Errors: OSError."""
    # SQLite gives its side files the mode of the database.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE))
    for side in SIDE_FILES:
        with suppress(FileNotFoundError):
            path.with_name(path.name + side).chmod(PRIVATE_FILE)


@contextmanager
def open_read_only(path: Path) -> Iterator[sqlite3.Connection]:
    """Open the existing database at `path` so that neither it nor its log changes, and yield the connection.

    No other connection may write to it meanwhile. Errors: DamagedError, sqlite3.Error.
    """
    # Without a log only the file itself is read: `immutable` keeps SQLite from making side files.
    mode = "mode=ro" if path.with_name(path.name + "-wal").exists() else "mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True)) as connection:
            yield connection
    except sqlite3.Error as error:
        if is_damage(error):
            raise DamagedError(f"{path}: is damaged: {error}") from error
        raise


def check_database(path: Path) -> None:
    """Read the whole database at `path`. Errors: DamagedError, sqlite3.Error."""
    with open_read_only(path) as connection:
        check_content(connection, path)


def check_content(connection: sqlite3.Connection, path: Path) -> None:
    """Raise DamagedError if SQLite finds a defect in the database."""
    (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise DamagedError(f"{path}: is damaged: {' '.join(str(found).split())[:200]}")


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Commit the block's statements together, or roll them back after an error."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):  # on a full disk SQLite rolls back by itself
            connection.execute("ROLLBACK")
        raise


def remove_database(path: Path) -> None:
    """Delete the database and the side files that SQLite keeps beside it."""
    # The database itself goes last: as long as it exists, recovery finds it.
    for side in reversed(SIDE_FILES):
        path.with_name(path.name + side).unlink(missing_ok=True)

"""Recovery: check a data directory when a server starts, and complete what a crash interrupted.

Only unfinished content is deleted, and answers that output files already hold. Content unknown to the index moves to
`lost/`, from where it can be moved back.
"""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path

import msgspec

from tok_client.decoders import decoder
from tok_client.types import FileObject
from tok_server.batch.storage.database import (
    PRIVATE_FILE,
    DamagedError,
    StoreError,
    check_content,
    check_version,
    open_read_only,
    remove_database,
)
from tok_server.batch.storage.directory import DataDirectory
from tok_server.batch.storage.store import VERSION, Store, StoredJob

log = logging.getLogger("tok.server")

MAX_NAMED = 10  # names that one log line lists


def check_index(data_directory: DataDirectory) -> None:
    """Refuse an index that is missing, empty or damaged while contents exist. Changes nothing.

    Errors: StoreError, which says what to do.
    """
    path = data_directory.store
    contents = _contents(data_directory)
    if not path.exists() or not path.stat().st_size:
        log_file = path.with_name(path.name + "-wal")
        if contents or (log_file.exists() and log_file.stat().st_size):
            raise StoreError(_without_index(data_directory, "is missing" if not path.exists() else "is empty"))
        return
    try:
        with open_read_only(path) as connection:
            check_content(connection, path)
            check_version(connection, path, VERSION)
            records = _check_records(connection, path)
    except DamagedError as error:
        raise DamagedError(
            f"{error}. {_DAMAGE_ADVICE.format(index=path, directory=data_directory.directory)}"
        ) from error
    except sqlite3.Error as error:
        raise StoreError(f"{path}: cannot be read: {error}") from error
    if contents and not records:
        raise StoreError(_without_index(data_directory, "has no entries"))


_DAMAGE_ADVICE = (
    "Nothing has been changed. Restore a copy of it; or save what can be read with "
    "`sqlite3 {index} .recover | sqlite3 recovered.sqlite`, and put that in its place without its -wal and -shm files; "
    "or start with another --data-dir and keep {directory} for later"
)


def _contents(data_directory: DataDirectory) -> list[Path]:
    """Return the blobs and answers that an index should have."""
    published = [path for _, path, finished in data_directory.blobs.entries() if finished]
    return [*published, *map(data_directory.answers, data_directory.answer_ids())]


def _without_index(data_directory: DataDirectory, problem: str) -> str:
    return (
        f"{data_directory.store}: {problem}, but files or answers exist beside it. Nothing has been changed. "
        "Restore the index (batches.sqlite and, if there is one, batches.sqlite-wal); or, to start without these "
        f"files, move files/ and batches/ and the remains of the index out of {data_directory.directory}"
    )


def _check_records(connection: sqlite3.Connection, path: Path) -> int:
    """Decode every record, and return how many there are. Errors: DamagedError."""
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    count = 0
    for table, kind in (("files", FileObject), ("batches", StoredJob)):
        if table not in tables:
            continue
        for number, record in connection.execute(f"SELECT number, record FROM {table}"):
            count += 1
            try:
                decoder(kind).decode(record)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError) as error:
                raise DamagedError(f"{path}: is damaged: row {number} of {table} cannot be read: {error}") from error
    return count


def recover(data_directory: DataDirectory, store: Store) -> None:
    """Complete or undo what a crash interrupted; move content unknown to the index to `lost/`. Errors: OSError."""
    for _, path, _ in data_directory.blobs.entries():
        path.chmod(PRIVATE_FILE)  # earlier versions used the umask's mode
    known = store.file_ids()
    lost = [str(data_directory.set_aside(path)) for path in _unknown_blobs(data_directory, known)]
    batches = store.batch_statuses()
    for id in data_directory.answer_ids():
        status = batches.get(id)
        if status is None or status == "failed":
            data_directory.set_answers_aside(id)
        elif status in ("completed", "expired", "cancelled"):
            remove_database(data_directory.answers(id))  # the output files have all of its answers
    if lost:
        names = ", ".join(lost[:MAX_NAMED]) + (", …" if len(lost) > MAX_NAMED else "")
        log.warning("moved %d files that are missing from the index to lost/: %s", len(lost), names)
    if gone := known.difference(id for id, _, finished in data_directory.blobs.entries() if finished):
        names = ", ".join(sorted(gone)[:MAX_NAMED]) + (", …" if len(gone) > MAX_NAMED else "")
        log.warning("the contents of %d files are missing: %s", len(gone), names)


def _unknown_blobs(data_directory: DataDirectory, known: set[str]) -> list[Path]:
    """Publish contents whose row was committed, delete unfinished ones, and return those unknown to the index."""
    unknown = []
    for id, path, finished in data_directory.blobs.entries():
        if finished:
            if id not in known:
                unknown.append(path)
        elif id in known and not data_directory.blobs.path(id).exists():
            data_directory.blobs.publish(id)  # the crash came between the commit and this step
        else:
            path.unlink()
    return unknown

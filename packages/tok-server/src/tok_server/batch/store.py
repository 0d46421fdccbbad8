"""Store: which files and batches there are, in one SQLite file; each change is on the disk when it returns.

A record is the JSON that clients see, beside the columns by which it is looked for. For one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import msgspec

from tok_client.decoders import decoder
from tok_client.types import Batch, FileObject
from tok_server.batch.database import open_database, transaction

VERSION = 1
SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    purpose TEXT NOT NULL,
    expires_at INTEGER,
    record BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    input TEXT NOT NULL,
    open INTEGER NOT NULL,
    record BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS files_expiring ON files (expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX IF NOT EXISTS batches_open ON batches (input) WHERE open
"""
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})

T = TypeVar("T")


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A batch, and what clients are not told of it.

    lines         of its input, once that has been validated
    keep_seconds  after which its output is deleted; None: never
    expired       it is being finished because its time was over
    """

    batch: Batch
    lines: int = 0
    keep_seconds: int | None = None
    expired: bool = False

    @property
    def open(self) -> bool:
        """Whether it still changes."""
        return self.batch.status not in ENDED


class Page(NamedTuple, Generic[T]):
    """Some records, and whether more follow."""

    records: list[T]
    more: bool


class Missing(LookupError):
    """There is no such record; `id` says which."""

    def __init__(self, kind: str, id: str) -> None:
        super().__init__(f"there is no {kind} {id[:80]!r}")
        self.id = id


class InUse(Exception):
    """A file that a batch still reads."""


class Store:
    """All records of a data directory."""

    def __init__(self, path: Path) -> None:
        self._connection = open_database(path, SCHEMA, VERSION, "FULL")
        self._file = decoder(FileObject)
        self._job = decoder(Job)

    def close(self) -> None:
        """Closes the file."""
        self._connection.close()

    # Files

    def add_file(self, file: FileObject) -> None:
        """A new file."""
        with transaction(self._connection):
            self._add_file(file)

    def _add_file(self, file: FileObject) -> None:
        expires = file.expires_at if isinstance(file.expires_at, int) else None
        row = (file.id, file.purpose, expires, msgspec.json.encode(file))
        self._connection.execute("INSERT INTO files (id, purpose, expires_at, record) VALUES (?, ?, ?, ?)", row)

    def file(self, id: str) -> FileObject:
        """One file. Errors: Missing."""
        row = self._connection.execute("SELECT record FROM files WHERE id = ?", (id,)).fetchone()
        if row is None:
            raise Missing("file", id)
        return self._file.decode(row[0])

    def files(self, after: str | None, limit: int, *, newest_first: bool, purpose: str | None) -> Page[FileObject]:
        """Files in the order of their making, from the one behind `after`. Errors: Missing."""
        where, values = ("AND purpose = ?", (purpose,)) if purpose is not None else ("", ())
        rows, more = self._page("file", "files", after, limit, newest_first, where, values)
        return Page([self._file.decode(row) for row in rows], more)

    def delete_file(self, id: str) -> None:
        """Errors: Missing, InUse."""
        with transaction(self._connection):
            self.file(id)
            user = self._connection.execute("SELECT id FROM batches WHERE open AND input = ?", (id,)).fetchone()
            if user is not None:
                raise InUse(f"file {id!r} is the input of batch {user[0]!r}, which has not ended")
            self._connection.execute("DELETE FROM files WHERE id = ?", (id,))

    def delete_expired(self, now: float) -> list[str]:
        """Deletes the files whose time is over, those in use aside; returns their ids."""
        where = "expires_at <= ? AND id NOT IN (SELECT input FROM batches WHERE open)"
        rows = self._connection.execute(f"DELETE FROM files WHERE {where} RETURNING id", (now,)).fetchall()
        return [id for (id,) in rows]

    def file_ids(self) -> set[str]:
        """The ids of all files."""
        return {id for (id,) in self._connection.execute("SELECT id FROM files")}

    # Batches

    def add_job(self, job: Job) -> None:
        """A new batch, whose input is a file with purpose "batch". Errors: Missing."""
        with transaction(self._connection):
            if self.file(job.batch.input_file_id).purpose != "batch":
                raise Missing("file with purpose 'batch' and id", job.batch.input_file_id)
            row = (job.batch.id, job.batch.input_file_id, job.open, msgspec.json.encode(job))
            self._connection.execute("INSERT INTO batches (id, input, open, record) VALUES (?, ?, ?, ?)", row)

    def job(self, id: str) -> Job:
        """One batch. Errors: Missing."""
        row = self._connection.execute("SELECT record FROM batches WHERE id = ?", (id,)).fetchone()
        if row is None:
            raise Missing("batch", id)
        return self._job.decode(row[0])

    def jobs(self, after: str | None, limit: int) -> Page[Job]:
        """Batches, the newest first, from the one behind `after`. Errors: Missing."""
        rows, more = self._page("batch", "batches", after, limit, True, "", ())
        return Page([self._job.decode(row) for row in rows], more)

    def open_jobs(self) -> list[Job]:
        """Batches that have not ended, the oldest first."""
        rows = self._connection.execute("SELECT record FROM batches WHERE open ORDER BY number")
        return [self._job.decode(record) for (record,) in rows]

    def change(self, id: str, change: Callable[[Job], Job], outputs: Sequence[FileObject] = ()) -> Job:
        """Makes of a batch what `change` makes of it, and adds its output files, both or neither. Errors: Missing."""
        with transaction(self._connection):
            job = change(self.job(id))
            row = (job.open, msgspec.json.encode(job), id)
            self._connection.execute("UPDATE batches SET open = ?, record = ? WHERE id = ?", row)
            for file in outputs:
                self._add_file(file)
        return job

    def _page(
        self,
        kind: str,
        table: str,
        after: str | None,
        limit: int,
        newest_first: bool,
        where: str,
        values: tuple[str, ...],
    ) -> tuple[list[bytes], bool]:
        """Records, and whether more follow."""
        order, beyond = ("DESC", "<") if newest_first else ("ASC", ">")
        if after is not None:
            found = self._connection.execute(f"SELECT number FROM {table} WHERE id = ?", (after,)).fetchone()
            if found is None:
                raise Missing(kind, after)
            where, values = f"{where} AND number {beyond} ?", (*values, found[0])
        query = f"SELECT record FROM {table} WHERE TRUE {where} ORDER BY number {order} LIMIT ?"
        rows = [record for (record,) in self._connection.execute(query, (*values, limit + 1))]
        return rows[:limit], len(rows) > limit

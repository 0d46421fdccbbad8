"""Store: the index of files and batches, in one SQLite file; each change is on disk when its method returns.

A record is the JSON that clients see, beside the columns that queries use. For one thread.

Each record has an owner: the tenant that created it. An owner sees its own records and those of NO_OWNER, which were
created without API keys. For other owners a record does not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import msgspec

from tok_client.decoders import decoder
from tok_client.types import Batch, FileObject
from tok_server.batch.storage.clock import ClockReading
from tok_server.batch.storage.database import open_database, transaction

VERSION = 2
NO_OWNER = ""
SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    purpose TEXT NOT NULL,
    deadline REAL,
    owner TEXT NOT NULL DEFAULT '',
    record BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    input TEXT NOT NULL,
    open INTEGER NOT NULL,
    owner TEXT NOT NULL DEFAULT '',
    record BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS clock (id INTEGER PRIMARY KEY CHECK (id = 1), elapsed REAL, boot TEXT, uptime REAL);
CREATE INDEX IF NOT EXISTS files_by_deadline ON files (deadline) WHERE deadline IS NOT NULL;
CREATE INDEX IF NOT EXISTS batches_open ON batches (input) WHERE open
"""
VISIBLE = "owner IN ('', ?)"
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})

T = TypeVar("T")


class StoredJob(msgspec.Struct, frozen=True, kw_only=True):
    """A batch, with fields that clients do not see.

    lines         number of input lines, once validated
    digest        digest of the input, once validated; "": unknown
    keep_seconds  seconds after which the output is deleted; None: never
    deadline      expiry time, on the data directory's clock; None: never
    owner         tenant that created it
    expired       the batch is being finished because its deadline has passed
    """

    batch: Batch
    lines: int = 0
    digest: str = ""
    keep_seconds: int | None = None
    deadline: float | None = None
    owner: str = NO_OWNER
    expired: bool = False

    @property
    def open(self) -> bool:
        """Return whether the batch has not ended."""
        return self.batch.status not in ENDED


class Page(NamedTuple, Generic[T]):
    """Some records, and whether more follow."""

    records: list[T]
    has_more: bool


class RecordNotFound(LookupError):
    """A record that does not exist; `id` names it."""

    def __init__(self, kind: str, id: str) -> None:
        super().__init__(f"there is no {kind} {id[:80]!r}")
        self.id = id


class FileInUse(Exception):
    """A file that an open batch reads."""


class Store:
    """All records of a data directory. Methods with an `owner` see only what that owner may see."""

    def __init__(self, path: Path) -> None:
        self._file = decoder(FileObject)
        self._job = decoder(StoredJob)
        self._connection = open_database(path, SCHEMA, VERSION, "FULL")

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    # Clock

    def clock(self) -> ClockReading | None:
        """Return the clock as last saved; None if it never was."""
        row = self._connection.execute("SELECT elapsed, boot, uptime FROM clock").fetchone()
        return None if row is None else ClockReading(*row)

    def save_clock(self, reading: ClockReading) -> None:
        """Save the clock."""
        with transaction(self._connection):
            self._connection.execute("INSERT OR REPLACE INTO clock VALUES (1, ?, ?, ?)", reading)

    # Files

    def add_file(self, file: FileObject, owner: str = NO_OWNER, deadline: float | None = None) -> None:
        """Add a file.

        deadline  time at which it may be deleted, on the data directory's clock; None: never
        """
        with transaction(self._connection):
            self._add_file(file, owner, deadline)

    def _add_file(self, file: FileObject, owner: str, deadline: float | None) -> None:
        row = (file.id, file.purpose, deadline, owner, msgspec.json.encode(file))
        self._connection.execute("INSERT INTO files (id, purpose, deadline, owner, record) VALUES (?, ?, ?, ?, ?)", row)

    def file(self, id: str, owner: str = NO_OWNER) -> FileObject:
        """Return a file. Errors: RecordNotFound."""
        query = f"SELECT record FROM files WHERE id = ? AND {VISIBLE}"
        row = self._connection.execute(query, (id, owner)).fetchone()
        if row is None:
            raise RecordNotFound("file", id)
        return self._file.decode(row[0])

    def files(
        self, after: str | None, limit: int, *, newest_first: bool, purpose: str | None, owner: str = NO_OWNER
    ) -> Page[FileObject]:
        """Return a page of files in order of creation, beginning after the file `after`. Errors: RecordNotFound."""
        where, values = ("AND purpose = ?", (purpose,)) if purpose is not None else ("", ())
        rows, has_more = self._page("file", "files", after, limit, newest_first, where, values, owner)
        return Page([self._file.decode(row) for row in rows], has_more)

    def check_unused(self, id: str, owner: str = NO_OWNER) -> None:
        """Raise RecordNotFound for a file that does not exist, FileInUse for one that an open batch reads."""
        self.file(id, owner)
        user = self._connection.execute("SELECT id FROM batches WHERE open AND input = ?", (id,)).fetchone()
        if user is not None:
            raise FileInUse(f"file {id!r} is the input of batch {user[0]!r}, which has not ended")

    def expired(self, now: float) -> list[str]:
        """Return the ids of expired files that no open batch reads."""
        where = "deadline <= ? AND id NOT IN (SELECT input FROM batches WHERE open)"
        return [id for (id,) in self._connection.execute(f"SELECT id FROM files WHERE {where}", (now,))]

    def delete_files(self, ids: Iterable[str]) -> None:
        """Delete these files, whoever owns them: all or none."""
        with transaction(self._connection):
            self._connection.executemany("DELETE FROM files WHERE id = ?", [(id,) for id in ids])

    def file_ids(self) -> set[str]:
        """Return the ids of all files, whoever owns them."""
        return {id for (id,) in self._connection.execute("SELECT id FROM files")}

    # Batches

    def add_job(self, job: StoredJob) -> None:
        """Add a batch. Its input must be a file with purpose "batch" that its owner sees. Errors: RecordNotFound."""
        with transaction(self._connection):
            if self.file(job.batch.input_file_id, job.owner).purpose != "batch":
                raise RecordNotFound("file with purpose 'batch' and id", job.batch.input_file_id)
            row = (job.batch.id, job.batch.input_file_id, job.open, job.owner, msgspec.json.encode(job))
            self._connection.execute("INSERT INTO batches (id, input, open, owner, record) VALUES (?, ?, ?, ?, ?)", row)

    def job(self, id: str, owner: str) -> StoredJob:
        """Return a batch. Errors: RecordNotFound."""
        query = f"SELECT record FROM batches WHERE id = ? AND {VISIBLE}"
        return self._decode_job(id, self._connection.execute(query, (id, owner)).fetchone())

    def job_of_any_owner(self, id: str) -> StoredJob:
        """Return a batch, whoever owns it. Errors: RecordNotFound."""
        return self._decode_job(
            id, self._connection.execute("SELECT record FROM batches WHERE id = ?", (id,)).fetchone()
        )

    def _decode_job(self, id: str, row: tuple[bytes] | None) -> StoredJob:
        if row is None:
            raise RecordNotFound("batch", id)
        return self._job.decode(row[0])

    def jobs(self, after: str | None, limit: int, owner: str = NO_OWNER) -> Page[StoredJob]:
        """Return a page of batches, newest first, beginning after the batch `after`. Errors: RecordNotFound."""
        rows, has_more = self._page("batch", "batches", after, limit, True, "", (), owner)
        return Page([self._job.decode(row) for row in rows], has_more)

    def batch_statuses(self) -> dict[str, str]:
        """Return the status of every batch by its id, whoever owns it."""
        records = self._connection.execute("SELECT record FROM batches")
        jobs = (self._job.decode(record) for (record,) in records)
        return {job.batch.id: job.batch.status for job in jobs}

    def open_jobs(self) -> list[StoredJob]:
        """Return the batches that have not ended, oldest first."""
        rows = self._connection.execute("SELECT record FROM batches WHERE open ORDER BY number")
        return [self._job.decode(record) for (record,) in rows]

    def change(
        self,
        id: str,
        change: Callable[[StoredJob], StoredJob],
        outputs: Sequence[FileObject] = (),
        output_deadline: float | None = None,
    ) -> StoredJob:
        """Replace a batch by `change(batch)` and add its output files, in one transaction. Errors: RecordNotFound."""
        with transaction(self._connection):
            job = change(self.job_of_any_owner(id))
            self._update(job)
            for file in outputs:
                self._add_file(file, job.owner, output_deadline)
        return job

    def _update(self, job: StoredJob) -> None:
        row = (job.open, msgspec.json.encode(job), job.batch.id)
        self._connection.execute("UPDATE batches SET open = ?, record = ? WHERE id = ?", row)

    def _page(
        self,
        kind: str,
        table: str,
        after: str | None,
        limit: int,
        newest_first: bool,
        where: str,
        values: tuple[str, ...],
        owner: str,
    ) -> tuple[list[bytes], bool]:
        """Return at most `limit` records, and whether more follow. Errors: RecordNotFound."""
        order, comparison = ("DESC", "<") if newest_first else ("ASC", ">")
        where, values = f"{VISIBLE} {where}", (owner, *values)
        if after is not None:
            query = f"SELECT number FROM {table} WHERE id = ? AND {VISIBLE}"
            found = self._connection.execute(query, (after, owner)).fetchone()
            if found is None:
                raise RecordNotFound(kind, after)
            where, values = f"{where} AND number {comparison} ?", (*values, found[0])
        query = f"SELECT record FROM {table} WHERE {where} ORDER BY number {order} LIMIT ?"
        rows = [record for (record,) in self._connection.execute(query, (*values, limit + 1))]
        return rows[:limit], len(rows) > limit

"""Blobs: contents of files, each a file of the data directory that is either complete or absent.

A blob is written under a temporary name, renamed after the index has committed its row, and renamed back before the
index deletes the row. After any crash, a blob unknown to the index is therefore unfinished, by its name, or
foreign.

    write file-….part ─► commit its row ─► rename to file-…
    rename to file-….part ─► delete its row ─► delete file-….part
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tok_server.batch.storage.database import PRIVATE_FILE

FILE_ID = re.compile(r"file-[0-9a-f]{24}")
UNFINISHED = ".part"
PRIVATE_DIRECTORY = 0o700


class Blobs:
    """The directory of all files' contents."""

    def __init__(self, directory: Path) -> None:
        make_directory(directory)
        self._directory = directory

    def path(self, file_id: str) -> Path:
        """Return the path of a file's content. Raises ValueError for an invalid id: it may come from a client."""
        if not FILE_ID.fullmatch(file_id):
            raise ValueError(f"file id {file_id[:80]!r}; allowed: file- and 24 hexadecimal digits")
        return self._directory / file_id

    def unpublished(self, file_id: str) -> Path:
        """Return the path of a file's content before `publish` and after `withdraw`."""
        path = self.path(file_id)
        return path.with_name(path.name + UNFINISHED)

    @contextmanager
    def writing(self, file_id: str) -> Iterator[IO[bytes]]:
        """Yield a stream to write the content to. At exit the content is synced to disk, ready for `publish`."""
        with _write_durably(self.unpublished(file_id), PRIVATE_FILE) as stream:
            yield stream

    def publish(self, file_id: str) -> None:
        """Rename written content to its final path. No effect if there is none."""
        try:
            os.replace(self.unpublished(file_id), self.path(file_id))
        except FileNotFoundError:
            return
        sync_directory(self._directory)

    def withdraw(self, file_id: str) -> None:
        """Rename content to its unpublished path, so that it can be discarded. No effect if there is none."""
        try:
            os.replace(self.path(file_id), self.unpublished(file_id))
        except FileNotFoundError:
            return
        sync_directory(self._directory)

    def discard(self, file_id: str) -> None:
        """Delete content that is not published, if it exists."""
        self.unpublished(file_id).unlink(missing_ok=True)

    def entries(self) -> list[tuple[str, Path, bool]]:
        """Return id, path, and whether it is published, of each content; foreign files are skipped."""
        entries_by_id = [(path.name.removesuffix(UNFINISHED), path) for path in sorted(self._directory.iterdir())]
        return [(id, path, path.name == id) for id, path in entries_by_id if FILE_ID.fullmatch(id) and path.is_file()]


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Yield a stream. At exit its content replaces `path` atomically; an error leaves `path` untouched."""
    unfinished = path.with_name(path.name + UNFINISHED)
    with _write_durably(unfinished, 0o666) as stream:
        yield stream
    os.replace(unfinished, path)
    sync_directory(path.parent)


@contextmanager
def _write_durably(path: Path, mode: int) -> Iterator[IO[bytes]]:
    """Yield a stream to a new file at `path`. The file is synced to disk at exit, or deleted after an error."""
    try:
        with open(path, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def make_directory(path: Path) -> None:
    """Create a directory with access for its owner only, or restrict an existing one so. Errors: OSError."""
    path.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
    path.chmod(PRIVATE_DIRECTORY)


def sync_directory(directory: Path) -> None:
    """Sync a directory to disk: until then a crash may lose new names in it."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

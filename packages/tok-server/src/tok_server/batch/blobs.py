"""Blobs: what files hold, each a file of the data directory. One is there as a whole, or not at all."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

FILE_ID = re.compile(r"file-[0-9a-f]{24}")
UNFINISHED = ".part"


class Blobs:
    """The directory of all files' contents."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory

    def path(self, file_id: str) -> Path:
        """Where a file's content is. Raises ValueError for what is no id: it may come from a client."""
        if not FILE_ID.fullmatch(file_id):
            raise ValueError(f"file id {file_id[:80]!r}; allowed: file- and 24 hexadecimal digits")
        return self._directory / file_id

    @contextmanager
    def writing(self, file_id: str) -> Iterator[IO[bytes]]:
        """A file to write to, which becomes the content when the context ends, if without an error."""
        with durable(self.path(file_id)) as stream:
            yield stream

    def delete(self, file_id: str) -> None:
        """Deletes the content, if there is any."""
        self.path(file_id).unlink(missing_ok=True)

    def sweep(self, known: Collection[str]) -> None:
        """Deletes what a death left behind: contents of no file, and unfinished ones; nothing that is not ours."""
        for path in list(self._directory.iterdir()):
            if path.name not in known and FILE_ID.fullmatch(path.name.removesuffix(UNFINISHED)):
                path.unlink()


@contextmanager
def durable(path: Path) -> Iterator[IO[bytes]]:
    """A stream to write to; `path` has all of it once the context has ended, and is untouched before."""
    unfinished = path.with_name(path.name + UNFINISHED)
    try:
        with unfinished.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    """A new name lasts only once its directory is on the disk, too."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Write a file that appears under its name only once it is complete."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from os import PathLike
from typing import IO


async def write_whole(path: str | PathLike[str], pieces: AsyncIterator[bytes]) -> int:
    """Write `pieces` to a temporary file and rename it to `path`, replacing an old file. Returns the size in bytes.

    OSError: the file cannot be written.
    """
    temporary = f"{os.fspath(path)}.part"
    size = 0
    try:
        with open(temporary, "wb") as file:
            async for piece in pieces:
                size += await asyncio.to_thread(file.write, piece)
            await asyncio.to_thread(_flush_to_disk, file)
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    return size


def _flush_to_disk(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())

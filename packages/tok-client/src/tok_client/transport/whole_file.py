"""A file that appears under its name when all of it has arrived, or not at all."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from os import PathLike
from typing import IO


async def write_whole(path: str | PathLike[str], pieces: AsyncIterator[bytes]) -> int:
    """Writes `pieces` to `path`, in place of what is there, by way of a file beside it; gives the size in bytes.

    OSError: it cannot be written.
    """
    part = f"{os.fspath(path)}.part"
    size = 0
    try:
        with open(part, "wb") as file:
            async for piece in pieces:
                size += await asyncio.to_thread(file.write, piece)
            await asyncio.to_thread(_settle, file)
        os.replace(part, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(part)
        raise
    return size


def _settle(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())

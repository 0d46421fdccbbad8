"""Test that a process's own memory is the pages it has written, not pages of files it has read."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from support.own_memory import own_memory

SIZE = 128 << 20


def test_own_memory_counts_written_pages_and_not_mapped_files(tmp_path: Path) -> None:
    path = tmp_path / "library"
    path.write_bytes(bytes(SIZE))
    before = own_memory(os.getpid())
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert mapped.find(b"x") == -1  # touches every page
        assert own_memory(os.getpid()) - before < SIZE // 2
    written = bytearray(b"x") * SIZE
    assert own_memory(os.getpid()) - before > SIZE // 2
    del written

"""Scratch directories of killed processes are removed by the next process; those in use are kept."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tok_core.runtime.scratch_directory import ScratchDirectory

HOLDER = """
import sys, time
from tok_core.runtime.scratch_directory import ScratchDirectory
kept = ScratchDirectory("sockets")
open(kept.name + "/reports", "w").close()
print(kept.name, flush=True)
time.sleep(3600)
"""


@pytest.fixture(autouse=True)
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(dir="/tmp"))  # pytest's own are too long for a socket's path
    monkeypatch.setenv("TMPDIR", str(path))
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    yield path
    shutil.rmtree(path)


def test_scratch_directory_of_a_killed_process_is_removed_and_no_other(parent: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    left = Path(holder.stdout.readline().strip())
    others = [parent / "tok-sockets-abc", parent / "tok-other-abcdefgh", parent / "file"]
    for other in others:
        other.mkdir()
    (parent / "tok-sockets-00000000").symlink_to(parent / "file")
    own = ScratchDirectory("sockets")
    assert left.is_dir()  # its process lives
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert (left / "reports").exists()
    ScratchDirectory("bench").cleanup()
    assert left.exists()  # of another kind
    ScratchDirectory("sockets").cleanup()
    assert not left.exists()
    assert Path(own.name).is_dir()
    own.cleanup()
    own.cleanup()
    assert not Path(own.name).exists()
    assert all(other.exists() for other in [*others, parent / "tok-sockets-00000000"])


def test_scratch_directory_survives_the_exit_of_a_forked_child() -> None:
    own = ScratchDirectory("sockets")
    code = f"import os\nassert os.path.isdir({own.name!r})"
    child = os.fork()
    if not child:
        own._remove()
        os._exit(0)
    os.waitpid(child, 0)
    assert Path(own.name).is_dir()
    subprocess.run([sys.executable, "-c", code], check=True)
    own.cleanup()


def test_dropped_scratch_directory_is_removed() -> None:
    name = ScratchDirectory("sockets").name
    assert not Path(name).exists()

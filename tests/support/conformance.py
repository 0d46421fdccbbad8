"""Run `tok serve` of the demo model for unmodified clients, with batches.

`python -m support.conformance DIR FLAGS` serves it until a line is entered, for clients with environments of their own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.patience import PATIENCE
from tok_server.demo import MODEL_DIR

NAME = "demo"


@contextmanager
def served(directory: Path, *more: str) -> Iterator[str]:
    """Run a server of that model with its data in `directory` and `more` flags, and yield its address."""
    model = directory / NAME  # the server serves the model by its directory's name
    model.mkdir()
    for file in MODEL_DIR.iterdir():
        (model / file.name).symlink_to(file)
    flags = ["--port", "0", "--device", "cpu", "--log-level", "error", "--data-dir", str(directory / "data"), *more]
    command = [sys.executable, "-m", "tok_server.cli", "serve", str(model), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as popen,
        # Ends the server also if this process is killed.
        subprocess.Popen(["sh", "-c", f"read line; kill {popen.pid}"], stdin=subprocess.PIPE) as lifeline,
    ):
        try:
            assert popen.stdout is not None
            found = re.search(r"http://127\.0\.0\.1:\d+", popen.stdout.readline())
            assert found is not None
            yield found[0]
        finally:
            lifeline.communicate()
            try:
                assert popen.wait(PATIENCE / 3) == 0
            finally:
                popen.kill()


if __name__ == "__main__":
    with served(Path(sys.argv[1]), *sys.argv[2:]) as address:
        input(f"{address} serves {NAME}; press Enter to stop\n")

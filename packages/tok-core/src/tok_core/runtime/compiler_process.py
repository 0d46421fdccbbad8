"""Start the process that compiles a worker's kernels, already before the worker has imported torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

GPU_DRIVER = Path("/dev/nvidiactl")  # exists where NVIDIA's driver is loaded
MANIFEST = "manifest.json"  # in a cache directory's part for one GPU, once an engine has started with it
START_MARKER = "tok-start-"  # begin of the names of files in Triton's cache, one for each start whose kernels it has


def start_compiler() -> subprocess.Popen[bytes]:
    """Start a process that imports `tok_core.worker.startup.precompile`, and then waits for a request to compile.

    It ends when its standard input closes without one. Raises OSError.
    """
    # -c with this process's import path, so that the child finds the packages wherever this process loaded them.
    code = f"import sys; sys.path[:] = {sys.path!r}; from tok_core.worker.startup.precompile import main; main()"
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def is_first_start(cache_dir: str | None) -> bool:
    """Return whether no start has compiled kernels yet in `cache_dir` (None: in Triton's own cache) on a machine's GPU.

    A start of another model or GPU counts, too. The answer needs no torch, and has to be right only mostly.
    """
    if not GPU_DRIVER.exists():
        return False
    if cache_dir is not None:
        return not any(Path(cache_dir).expanduser().glob(f"*/{MANIFEST}"))
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    cache = Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
    return not any(cache.glob(f"{START_MARKER}*"))

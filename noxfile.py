"""The checks of the workspace: `uv run nox` runs lint, types and tests; `uv run nox -l` lists the rest.

Every session runs in the environment that `uv run` has just made from the lock. One of its own for each would
need the same packages again, several gigabytes a copy, and could test other versions than those in use.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tests"))

from support.lockfile import addressless  # noqa: E402
from support.workspace import PACKAGES, uv  # noqa: E402

TEST_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # each test process has one core; more threads only take turns on it
    "TOKENIZERS_PARALLELISM": "false",
    # The tests start hundreds of processes. Compiling torch and transformers anew would be half of what each costs.
    "PYTHONDONTWRITEBYTECODE": "",
}

# Whole servers first and small files last, so that no core is left alone with the longest of them at the end.
SUITE = ("tests", *(f"packages/{package}" for package in ("tok-core", "tok-kernels", "tok-server", "tok-client")))
PYTEST = ("-m", "pytest", "-n", "logical", "--maxprocesses", "4", "--dist", "loadfile", "--no-loadscope-reorder")

nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "types", "tests"]


@nox.session
def lint(session: nox.Session) -> None:
    """Style: ruff's rules and its formatting."""
    session.run(sys.executable, "-m", "ruff", "check", ".")
    session.run(sys.executable, "-m", "ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Types: mypy, strict, over sources and tests."""
    session.run(sys.executable, "-m", "mypy")
    for conftest in (ROOT / "conftest.py", *sorted(ROOT.glob("packages/*/tests/conftest.py"))):
        session.run(sys.executable, "-m", "mypy", str(conftest))


@nox.session
def tests(session: nox.Session) -> None:
    """Tests; what follows `--` goes to pytest."""
    session.run(sys.executable, *PYTEST, "-m", "not browser", *(session.posargs or SUITE), env=TEST_ENVIRONMENT)


@nox.session
def coverage(session: nox.Session) -> None:
    """The same tests, and which lines and branches they miss; takes half as long again."""
    session.run(sys.executable, "-m", "coverage", "erase")
    measured = (sys.executable, "-m", "coverage", "run", *PYTEST, "-m", "not browser")
    session.run(*measured, *(session.posargs or SUITE), env=TEST_ENVIRONMENT)
    session.run(sys.executable, "-m", "coverage", "combine", "--quiet")
    session.run(sys.executable, "-m", "coverage", "report")


@nox.session
def browser(session: nox.Session) -> None:
    """The tests that look at the dashboard in Chromium; what follows `--` goes to pytest."""
    # Named, so that not everything else is imported in search of them.
    files = (path for pattern in ("tests", "packages/*/tests") for path in ROOT.glob(f"{pattern}/test_*.py"))
    theirs = [str(path) for path in files if "pytest.mark.browser" in path.read_text()]
    session.run(sys.executable, "-m", "pytest", "-m", "browser", *(session.posargs or theirs), env=TEST_ENVIRONMENT)


@nox.session
def build(session: nox.Session) -> None:
    """A source distribution and a wheel of each package, into dist/."""
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    session.run(uv(), "build", "--all-packages")
    built = sorted(wheel.name.split("-")[0] for wheel in (ROOT / "dist").glob("*.whl"))
    expected = [package.replace("-", "_") for package in PACKAGES]
    if built != expected:
        session.error(f"dist/ holds wheels of {built}; expected {expected}")


@nox.session
def lock(session: nox.Session) -> None:
    """Lock the dependencies and write the lock as it is committed; what follows `--` goes to `uv lock`."""
    path = ROOT / "uv.lock"
    session.run(uv(), "lock", *session.posargs)
    path.write_text(addressless(path.read_text()))


@nox.session
def gpu(session: nox.Session) -> None:
    """The tests that need a CUDA device; what follows `--` goes to pytest."""
    import torch

    if not torch.cuda.is_available():
        session.error("the gpu session needs a CUDA device, and torch finds none on this machine")
    session.run(sys.executable, "-m", "pytest", "-m", "gpu", *session.posargs, env=TEST_ENVIRONMENT)

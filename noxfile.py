"""The checks of the workspace: `uv run nox` runs lint, types and tests; `uv run nox -l` lists the rest.

Every session runs in the environment that `uv run` has just made from the lock. One of its own for each would
need the same packages again, several gigabytes a copy, and could test other versions than those in use.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tests"))

from support.lockfile import addressless  # noqa: E402
from support.workspace import PACKAGES, PYTHONS, uv  # noqa: E402

TEST_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # each test process has one core; more threads only take turns on it
    "OMP_WAIT_POLICY": "PASSIVE",  # tests with two threads: one that spins keeps the core from the one it waits for
    "TOKENIZERS_PARALLELISM": "false",
}

# Whole servers first and small files last, so that no core is left alone with the longest of them at the end.
SUITE = ("tests", *(f"packages/{package}" for package in ("tok-core", "tok-kernels", "tok-server", "tok-client")))
WORKERS = min(4, (os.cpu_count() or 1) + 1)  # one more than there are cores: tests of servers often wait
PYTEST = ("-m", "pytest", "-n", str(WORKERS), "--dist", "loadfile", "--no-loadscope-reorder", "--maxfail", "10")
SLOWEST = ("--durations", "10")  # said at the end: which ten tests cost most

# Files of tests that start no process and build no engine, by the words after `test_` in their names.
QUICK = {
    "tests": "docs_links workspace_imports",
    "packages/tok-core/tests": (
        "data_parallel_routing delivery grammar_regex manager_faults manager_forecast "
        "manager_grouping manager_length_model manager_microbatches manager_page_allocator manager_page_copies "
        "manager_prefix_tree manager_prompts manager_run_ahead manager_stops manager_watchdog model_config "
        "parallel_shard_plan text_detokenise text_template text_tokenizer worker_step_tensors"
    ),
    "packages/tok-kernels/tests": (
        "backend_choice kernels_filters kernels_layers kernels_merge kernels_philox kernels_rope_table kernels_sampling"
    ),
    "packages/tok-server/tests": "api_small batch_store bench_workload cli_help passatk_answers",
    "packages/tok-client/tests": "client_backoff client_resources client_scoring client_sse",
}

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
    for conftest in (ROOT / "conftest.py", *sorted(ROOT.glob("packages/*/tests/**/conftest.py"))):
        session.run(sys.executable, "-m", "mypy", str(conftest))


@nox.session
def tests(session: nox.Session) -> None:
    """Tests; what follows `--` goes to pytest, such as `--random-files SEED`: no file depends on those before it."""
    session.run(
        sys.executable, *PYTEST, *SLOWEST, "-m", "not browser", *(session.posargs or SUITE), env=TEST_ENVIRONMENT
    )


@nox.session
def quick(session: nox.Session) -> None:
    """Style, and the tests that start no process: a minute's check while writing."""
    lint(session)
    files = [f"{folder}/test_{name}.py" for folder, names in QUICK.items() for name in names.split()]
    session.run(sys.executable, *PYTEST, *files, *session.posargs, env=TEST_ENVIRONMENT)


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
def pythons(session: nox.Session) -> None:
    """The wheels in a new environment of each Python: what follows `--` names other versions or interpreters."""
    for python in session.posargs or PYTHONS:
        tested = (sys.executable, "-m", "pytest", "tests/test_install_wheels.py")
        session.run(*tested, env={**TEST_ENVIRONMENT, "UV_PYTHON": python})


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


# Small runs of each kernel: files, or tests in them; and words in the names of those that are left out. Under
# compute-sanitizer no CUDA graph is captured, kernels of several streams wait for each other, and all take long.
SANITIZED = (
    "exchange.py",
    "fp8.py",
    "int8_cache.py",
    "linear.py",
    "shards.py",
    "slots.py",
    "triton_layers.py",
    "triton_attention.py::test_cascade_attention_equals_attention_without_prefix_groups",
    "triton_attention.py::test_attention_of_any_mixed_step_equals_a_float64_loop",
    "triton_attention.py::test_attention_of_every_head_dim_and_dtype_is_within_tolerance",
    "triton_attention_gpu.py::test_split_kv_attention_of_one_long_sequence_equals_the_reference",
    "triton_attention.py::test_attention_over_pages_of_every_power_of_two",
    "triton_attention.py::test_split_kv_attention_of_any_mixed_step_equals_a_float64_loop",
    "triton_filters.py",
    "triton_penalties.py",
    "triton_sampling.py::test_rows_with_penalties_bias_or_filters_equal_the_reference",
    "triton_sampling.py::test_tokens_at_minus_infinity_are_never_sampled",
    "triton_sampling.py::test_sampling_over_several_vocabulary_blocks_equals_the_reference",
    "triton_sampling.py::test_sampling_accepts_strided_logits",
    "triton_sampling.py::test_sampled_tokens_equal_the_reference",
    "triton_sampling.py::test_top_logprobs_are_sorted_with_ties_by_lowest_id",
)
UNFIT = ("at_once", "every_launch_config", "full_batches", "graph", "real_vocabulary", "whole_vocabularies")


@nox.session
def sanitizer(session: nox.Session) -> None:
    """Small runs of all kernels under compute-sanitizer's memcheck; what follows `--` goes to pytest."""
    import torch

    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None or not torch.cuda.is_available():
        session.skip("the sanitizer session needs compute-sanitizer and a CUDA device, and one of them is not here")
    tests = [f"packages/tok-kernels/tests/in_triton/test_kernels_{test}" for test in SANITIZED]
    fit = " and ".join(f"not {word}" for word in UNFIT)
    # Tensors that come from one piece of memory would hide that one is read beyond its end.
    environment = {**TEST_ENVIRONMENT, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    checked = (tool, "--tool", "memcheck", "--error-exitcode", "1", sys.executable, "-m", "pytest", "-m", "gpu")
    session.run(*checked, "-k", fit, *tests, *session.posargs, env=environment, external=True)

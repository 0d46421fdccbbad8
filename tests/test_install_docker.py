"""Tests of what a Dockerfile's build and run need: copied files, uv's command, flags. No image is built."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from fnmatch import fnmatch
from pathlib import Path

import pytest

from support.uv_runs import run_offline_first, run_uv
from support.workspace import PACKAGES, ROOT, files
from tok_server.cli import make_parser

DOCKERFILE = ROOT / "packages" / "tok-server" / "Dockerfile"
PAGE = ROOT / "packages" / "tok-server" / "docs" / "install.md"


def instructions(keyword: str) -> list[str]:
    """Return the arguments of each instruction `keyword`, with continued lines joined."""
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    return re.findall(rf"^{keyword} (.+)$", text, re.MULTILINE)


def entry_point() -> list[str]:
    (line,) = instructions("ENTRYPOINT")
    words: list[str] = json.loads(line)
    return words


def build_context() -> list[Path]:
    """Return the files of the workspace that Docker sends to the build, relative to the root."""
    lines = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().split()
    everything, *others = lines
    assert everything == "*"
    kept = [line[1:] for line in others if line.startswith("!")]
    dropped = [line.removeprefix("**/") for line in others if line.startswith("**/")]
    assert len(kept) + len(dropped) == len(others)
    names = [path.relative_to(ROOT) for path in files()]
    return [
        name
        for name in names
        if name.parts[0] in kept and not any(fnmatch(part, pattern) for part in name.parts for pattern in dropped)
    ]


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the image has when uv runs."""
    folder = tmp_path_factory.mktemp("image")
    context = build_context()
    for line in instructions("COPY"):
        *sources, target = line.split()
        for source in sources:
            found = [name for name in context if name.is_relative_to(source)]
            assert found, f"{source} is not in the build context"
            for name in found:
                path = (
                    folder / target / name.relative_to(source) if (ROOT / source).is_dir() else folder / target / name
                )
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, path)
    return folder


def test_packages_can_be_installed_from_the_copied_files_alone(copied: Path) -> None:
    (line,) = (line for line in instructions("RUN") if line.startswith("uv "))
    command = [word for word in shlex.split(line) if word != "--no-cache"]
    done = run_offline_first([*command, "--dry-run"], cwd=copied)
    assert done.returncode == 0, done.stderr
    planned = set(re.findall(r"^ \+ ([\w-]+)", done.stderr, re.MULTILINE))
    assert {"torch", "flashinfer-python", *PACKAGES} <= planned
    assert "pytest" not in planned
    run_uv("build", "--all-packages", "--wheel", "--out-dir", copied / "dist", cwd=copied)
    assert len(list((copied / "dist").glob("*.whl"))) == len(PACKAGES)


@pytest.mark.parametrize(("page", "count"), [(PAGE, 4), (ROOT / "README.md", 1)])
def test_documented_docker_commands_use_existing_files_and_flags(page: Path, count: int) -> None:
    commands = [shlex.split(line) for line in re.findall(r"^    (docker .+)$", page.read_text(), re.MULTILINE)]
    build, *runs = commands
    assert build[:2] == ["docker", "build"]
    assert ROOT / build[build.index("-f") + 1] == DOCKERFILE
    image = build[build.index("-t") + 1]
    _, *serve = entry_point()
    assert len(runs) == count
    others = [run for run in runs if "--entrypoint" in run]
    for run in others:
        assert run[run.index("--entrypoint") + 1] == "tok"
        command = run[run.index(image, run.index("--entrypoint") + 2) + 1 :]
        make_parser(command[:1]).parse_args(command)  # exits if a flag does not exist
    for run in (run for run in runs if run not in others):
        options = make_parser(["serve"]).parse_args([*serve, *run[run.index(image) + 1 :]])
        assert options.host == "0.0.0.0"
        assert f"127.0.0.1:{options.port}:{options.port}" in run
        assert instructions("EXPOSE") == [str(options.port)]

"""Tests that the Python blocks of the READMEs run unchanged against the demo model."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from support.patience import PATIENCE
from support.serving import Server, serving
from support.workspace import ROOT
from tok_server.demo import MODEL_DIR

URL = "http://127.0.0.1:10210/v1"


def blocks(readme: str) -> list[str]:
    found = re.findall(r"```python\n(.*?)```", (ROOT / readme).read_text(), re.DOTALL)
    assert found
    return found


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(MODEL_DIR, name="tok-demo") as running:
        yield running


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_readme_python_blocks_run(server: Server) -> None:
    engine, client = blocks("README.md")
    assert re.findall(r"^(\d) (?:stop|length) ", run(engine), re.MULTILINE) == ["0", "1", "2", "3"]
    assert run(client.replace(URL, server.url)).strip()


def test_engine_readme_python_blocks_run() -> None:
    for block in blocks("packages/tok-core/README.md"):
        assert run(f"MODEL = {str(MODEL_DIR)!r}\n{block}").strip()

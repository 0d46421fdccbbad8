"""Examples of the package's README run unchanged but for names and ports."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from support.patience import PATIENCE, wait_until
from support.serving import NAME, Server, free_port

README = Path(__file__).parents[1] / "README.md"


def snippet(containing: str) -> str:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    (found,) = [block for block in blocks if containing in block]
    return str(found)


def test_readme_client_example_prints_four_answers(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    code = snippet("from openai").replace("http://127.0.0.1:10210/v1", server.url).replace("tok-demo", NAME)
    names: dict[str, object] = {}
    exec(compile(code, str(README), "exec"), names)
    names["client"].close()  # type: ignore[attr-defined]
    printed = capsys.readouterr().out
    found = [line[0] for line in printed.splitlines() if re.match(r"[0-3] ", line)]
    assert sorted(set(found)) == list("0123")  # a line within an answer may begin with a digit, too


def test_readme_make_app_example_serves_and_exits(tiny_model: Path, tmp_path: Path) -> None:
    port = free_port()
    code = snippet("make_app").replace("./my-model", str(tiny_model)).replace("10210", str(port))
    (script := tmp_path / "embed.py").write_text(code, encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.DEVNULL, env=environment) as popen:
        try:
            wait_until(lambda: healthy(port))
            popen.send_signal(signal.SIGTERM)
            assert popen.wait(PATIENCE) == 0
        finally:
            popen.kill()


def healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=PATIENCE) as answer:
            return bool(answer.status == 200)
    except urllib.error.URLError:
        return False

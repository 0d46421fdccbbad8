"""Diffs shown in the how-to documents apply to the sources, and what follows them runs on the result."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.patience import PATIENCE
from support.workspace import ROOT

DOCUMENTS = sorted(path for path in (ROOT / "docs").glob("*.md") if "```diff\n" in path.read_text(encoding="utf-8"))
SHOWN = re.compile(r"```diff\n(.*?)```.*?```python\n(.*?)```\s*```text\n(.*?)```", re.DOTALL)


def apply(diff: str, root: Path) -> None:
    """Apply a diff whose hunks have no line numbers: each replaces text that its file holds once."""
    for part in re.split(r"^--- .*\n(?=\+\+\+ )", diff, flags=re.MULTILINE)[1:]:
        name, _, hunks = part.partition("\n")
        file = root / name.removeprefix("+++ b/")
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        for hunk in re.split(r"^@@.*\n", hunks, flags=re.MULTILINE)[1:]:
            lines = hunk.splitlines()
            old = "".join(f"{line[1:]}\n" for line in lines if line[:1] in " -")
            new = "".join(f"{line[1:]}\n" for line in lines if line[:1] in " +")
            assert text.count(old) == 1 or not text, f"{name}: {old}"
            text = text.replace(old, new) if text else new
        file.write_text(text, encoding="utf-8")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_diff_of_a_document_applies_and_its_example_prints_what_is_shown(document: Path, tmp_path: Path) -> None:
    found = SHOWN.search(document.read_text(encoding="utf-8"))
    assert found is not None
    diff, code, printed = found.groups()
    sources = [Path("packages") / package / "src" for package in ("tok-core", "tok-kernels")]
    for source in sources:
        shutil.copytree(ROOT / source, tmp_path / source)
    apply(diff, tmp_path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(tmp_path / source) for source in sources)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed


def test_there_is_a_document_with_a_diff() -> None:
    assert DOCUMENTS

"""Tests that links and figures in the repository's documents are valid."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.patience import PATIENCE
from support.workspace import PACKAGES, ROOT

DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / "packages" / package / "README.md" for package in PACKAGES),
    *sorted((ROOT / "packages").glob("*/docs/*.md")),
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_a_document_lead_to_files(document: Path) -> None:
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)  # no code
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_the_life_of_a_request_names_a_file_at_each_step() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    life = text.partition("## Life of a request\n")[2].partition("\n## ")[0]
    steps = re.split(r"^\d+\. ", life, flags=re.MULTILINE)[1:]
    assert len(steps) == 10
    for step in steps:
        assert ".py)" in step, step


def test_figures_equal_the_output_of_their_script(tmp_path: Path) -> None:
    script = tmp_path / "figures.py"
    script.write_bytes((ROOT / "docs" / "figures.py").read_bytes())
    subprocess.run([sys.executable, str(script)], check=True, timeout=PATIENCE)
    drawn = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    assert drawn
    assert drawn == {path.name: path.read_text() for path in (ROOT / "docs").glob("*.svg")}

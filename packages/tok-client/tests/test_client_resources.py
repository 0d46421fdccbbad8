"""Test that the code of sync and async resources differs only in `await` and class names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import tok_client.resources

FILES = sorted(Path(tok_client.resources.__file__).parent.glob("[a-z]*.py"))
SAME = re.compile(
    r"\bawait |\basync (?=def )|(?<!\w)Async(?=[A-Z])(?!Iterable)|\bBlocking(?=Transport)|\b(?:asyncio|time)\.(?=sleep)"
)
CLASS = re.compile(r"^class (?P<name>\w+).*?(?=^class |\Z)", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("file", [file for file in FILES if file.stem != "resource"], ids=lambda file: file.stem)
def test_sync_and_async_resources_have_the_same_code(file: Path) -> None:
    found = {one["name"]: one[0].strip() for one in CLASS.finditer(file.read_text(encoding="utf-8"))}
    twins = [name for name in found if f"Async{name}" in found]
    assert len(found) == 2 * len(twins) > 0
    for name in twins:
        assert plain(found[f"Async{name}"]) == plain(found[name])


def plain(code: str) -> str:
    """Return the code without async keywords, names and line breaks."""
    return ast.unparse(ast.parse(SAME.sub("", code)))

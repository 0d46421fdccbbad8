"""Tests that commands in the documentation run and print the shown output, and that every flag is documented."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.documents import Reader, blocks_of, indented_commands, same_every_time
from support.workspace import ROOT
from tok_server.cli import make_parser
from tok_server.flags.engine_flags import add_serve

DOCS = ROOT / "packages" / "tok-server" / "docs"
SERVER_PAGES = sorted(DOCS.glob("*.md"))
HOW_TO = [ROOT / "docs" / f"{name}.md" for name in ("add-a-model", "debug-a-wrong-token", "profile-a-step")]
PAGES = [*SERVER_PAGES, *HOW_TO]
FLAG_ROW = re.compile(r"^\| `(--[a-z0-9-]+)`[^|]*\|([^|]*)\|", re.MULTILINE)


def name_of(page: Path) -> str:
    return page.stem


def serve_flags() -> dict[str, argparse.Action]:
    parser = argparse.ArgumentParser(add_help=False)
    add_serve(parser)
    own = [action for action in parser._actions if action.default != argparse.SUPPRESS]  # vLLM's flags have no default
    return {flag: action for action in own for flag in action.option_strings}


def flag_rows() -> Iterator[tuple[Path, str, str]]:
    for page in PAGES:
        for flag, default in FLAG_ROW.findall(page.read_text(encoding="utf-8")):
            yield page, flag, default.strip().strip("`")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_doc_blocks_run_and_print_the_shown_output(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = blocks_of(page)
    assert blocks
    with Reader(tmp_path) as reader:
        for block, printed in reader.read(blocks):
            if block.output is not None:
                assert same_every_time(printed) == same_every_time(block.output), block.code


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_indented_doc_commands_use_existing_flags(page: Path) -> None:
    for command in indented_commands(page):
        words = shlex.split(command)[1:]
        make_parser(words[:1]).parse_args(words)


def test_every_server_flag_is_documented_with_its_default() -> None:
    flags = serve_flags()
    told = {flag: default for _, flag, default in flag_rows() if flag in flags}
    assert told.keys() == flags.keys()
    for flag, default in told.items():
        value = flags[flag].default
        if isinstance(value, bool) or value is None:  # documented in words
            assert default, flag
        else:
            shown = f"{value:g}" if isinstance(value, float) else str(value)
            assert default.replace(",", "") == shown, flag


def test_doc_output_comparison_ignores_ids_times_and_floats() -> None:
    one = '{"id":"cmpl-0123456789abcdef01234567","created":1795298357,"seconds":0.25,"text":"a"}'
    other = '{"id":"cmpl-76543210fedcba9876543210","created":1795298359,"seconds":1.5e-05,"text":"a"}'
    assert same_every_time(one) == same_every_time(other)
    assert same_every_time(one) != same_every_time(other.replace('"a"', '"b"'))

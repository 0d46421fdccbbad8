"""Every --help page ends with examples that its command accepts."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator

import pytest

from tok_server.cli import make_parser


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    actions = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    return {name: found for action in actions for name, found in action.choices.items()}


def pages(words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of every command and subcommand, including those that load their flags only when called."""
    yield words
    parser = make_parser(words[:1])
    for word in words:
        parser = subparsers(parser)[word]
    for name in subparsers(parser):
        yield from pages((*words, name))


PAGES = list(pages())


def page(words: tuple[str, ...]) -> str:
    parser = make_parser(words[:1])
    for word in words:
        parser = subparsers(parser)[word]
    return parser.format_help()


def test_help_pages_include_subcommands() -> None:
    commands = {"serve", "batch", "chat", "models", "quantize", "warm", "kernels", "pass-at-k", "bench"}
    assert {(name,) for name in commands} | {("bench", name) for name in ("offline", "serve", "kernels")} <= set(PAGES)


@pytest.mark.parametrize("words", PAGES, ids=" ".join)
def test_help_page_ends_with_examples_that_its_parser_accepts(words: tuple[str, ...]) -> None:
    _, found, examples = page(words).partition("\nexamples:\n")
    assert found
    lines = re.findall(r"^  (tok .*?)(?:   .*)?$", examples.replace("\\\n", ""), re.MULTILINE)
    assert lines
    assert any(shlex.split(line)[1 : 1 + len(words)] == list(words) for line in lines)
    for line in lines:
        given = shlex.split(line)[1:]
        if given != ["COMMAND", "--help"]:
            make_parser(given[:1]).parse_args(given)  # exits if an example is invalid


@pytest.mark.parametrize("words", [("batch",), ("bench", "offline"), ("bench", "kernels"), ("kernels",)], ids=" ".join)
def test_data_dir_help_of_non_serving_commands_mentions_only_models(words: tuple[str, ...]) -> None:
    (kept,) = re.findall(r"--data-dir DIR\s+(.*?)(?=\n  -)", page(words), re.DOTALL)
    assert " ".join(kept.split()) == "directory for downloaded models (default: Hugging Face cache)"

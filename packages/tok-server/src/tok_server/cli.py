"""The `tok` command: names and flags of its subcommands. Importing this module loads nothing heavy."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import version
from io import TextIOWrapper
from typing import Any, NoReturn, cast

from tok_core import InvalidField, TokError
from tok_server.flags import (
    BATCH_EXAMPLES,
    CHAT_EXAMPLES,
    KERNELS_EXAMPLES,
    MODELS_EXAMPLES,
    QUANTIZE_EXAMPLES,
    SERVE_EXAMPLES,
    TOK_EXAMPLES,
    WARM_EXAMPLES,
    add_batch,
    add_chat,
    add_kernels,
    add_quantize,
    add_serve,
    add_warm,
)

PASS_AT_K = "pass-at-k"
BENCH = "bench"
POSITIONALS = {("quantize", "out"): "OUT", ("batch", "file"): "FILE.jsonl"}
"""Command and field -> the argument without dashes that sets it; `model` keeps its name in every command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code: 0, 1 (it failed) or 2 (bad flags)."""
    if isinstance(sys.stdout, TextIOWrapper):  # print ? for a character that the terminal's encoding lacks
        sys.stdout.reconfigure(errors="replace")
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = make_parser(arguments[:2])
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    return _run(options)


def serve_main() -> int:
    """Run `tok serve`; the entry point of `tok-server`."""
    return main(["serve", *sys.argv[1:]])


def _run(options: argparse.Namespace) -> int:
    """Run the command; report a failure in one line."""
    try:
        command = cast("Callable[[argparse.Namespace], int]", import_module(options.module).main)
        code = command(options)
        sys.stdout.flush()  # a closed pipe is noticed here rather than when the interpreter exits
        return code
    except InvalidField as error:
        flag = error.field if error.field == "model" else "--" + error.field.replace("_", "-")
        named = error.renamed(POSITIONALS.get((options.command, error.field), flag))
        return _fail(options.command, str(named), 2)
    except TokError as error:
        return _fail(options.command, str(error), 1)
    except BrokenPipeError:  # the reader of the output, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter's last flush fails
        return 1
    except OSError as error:
        if error.filename is None:  # no file of the user's
            raise
        return _fail(options.command, f"{error.filename}: {error.strerror}", 1)
    except KeyboardInterrupt:
        return 130


def _fail(command: str, message: str, code: int) -> int:
    print(f"tok {command}: error: {message}", file=sys.stderr)
    return code


def make_parser(command: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of all commands.

    `command` is the one called, if known, and its subcommand; only the command's module may be loaded.
    """
    parser = _Parser(prog="tok", description="LLM inference for throughput.", epilog=TOK_EXAMPLES)
    parser.add_argument("--version", action="version", version=f"tok {version('tok-server')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")

    def add(name: str, module: str, help: str, description: str = "", epilog: str = "") -> argparse.ArgumentParser:
        description = description or f"{help[0].upper()}{help[1:]}."
        added = commands.add_parser(name, help=help, description=description, epilog=epilog)
        added.set_defaults(module=f"tok_server.{module}")
        return added

    text = "serve a model over HTTP with an OpenAI-compatible API"
    add_serve(add("serve", "commands.serve", text, epilog=SERVE_EXAMPLES))
    text = "Answer a file of requests in the format of OpenAI's batch API, without a server."
    add_batch(add("batch", "commands.batch", "answer a file of requests, without a server", text, BATCH_EXAMPLES))
    text = "Chat with a model in the terminal. Ctrl-C stops an answer, /help lists commands, Ctrl-D quits."
    add_chat(add("chat", "commands.chat", "chat with a model in the terminal", text, CHAT_EXAMPLES))
    text = "list the supported architectures, or describe a model directory"
    models = add("models", "commands.models", text, epilog=MODELS_EXAMPLES)
    models.add_argument("model", nargs="?", metavar="MODEL", help="model directory to describe")
    text = "Write a model with its linear layers rounded to fewer bits, as a checkpoint of compressed-tensors."
    add_quantize(add("quantize", "commands.quantize", "round a model's weights to fewer bits", text, QUANTIZE_EXAMPLES))
    text = "Start a model, and keep its compiled kernels and measured choices in a directory for later starts."
    add_warm(add("warm", "commands.warm", "compile a model's kernels into a directory", text, WARM_EXAMPLES))
    text = "show the attention kernels chosen for a model on this machine, and their times"
    add_kernels(add("kernels", "commands.kernels", text, epilog=KERNELS_EXAMPLES))
    measure = add(PASS_AT_K, "passatk.command", "sample many answers per problem and estimate pass@k")
    if list(command[:1]) == [PASS_AT_K]:
        import_module("tok_server.passatk.command").add_arguments(measure)
    bench = add(BENCH, "commands.bench", "measure throughput of the engine or of any OpenAI-compatible server")
    if list(command[:1]) == [BENCH]:
        import_module("tok_server.bench.flags").add_arguments(bench, *command[1:2])
    return parser


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Help formatter with a column wide enough for the longest flag."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)


class _Parser(argparse.ArgumentParser):
    """Argument parser that prints examples as written, accepts no abbreviated flags and reports errors in one line."""

    def __init__(self, *args: object, **settings: object) -> None:
        settings.setdefault("formatter_class", _Formatter)
        settings.setdefault("allow_abbrev", False)
        super().__init__(*args, **settings)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 after one line."""
        message = message.removeprefix("argument ")
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse as the base class does, but exit at an unknown argument; name the flag that it resembles."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            shown = [
                flag for action in self._actions if action.help != argparse.SUPPRESS for flag in action.option_strings
            ]
            similar = get_close_matches(unknown[0].partition("=")[0], shown, 1, MIN_SIMILARITY)
            kind = "flag" if unknown[0].startswith("-") else "argument"
            self.error(f"unknown {kind} {unknown[0]}" + "".join(f"; did you mean {flag}?" for flag in similar))
        return options, unknown

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        try:
            return super()._get_value(action, text)
        except argparse.ArgumentError as error:
            if (allowed := NUMBERS.get(action.type)) is None:
                raise
            raise argparse.ArgumentError(None, f"{_name(action)} is {text!r}; allowed: {allowed}") from error

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            similar = get_close_matches(str(value), map(str, action.choices), 1, MIN_SIMILARITY)
            meant = "".join(f"; did you mean {word}?" for word in similar)
            allowed = ", ".join(map(str, action.choices))
            raise argparse.ArgumentError(None, f"{_name(action)} is {value!r}; allowed: {allowed}{meant}")


NUMBERS: dict[object, str] = {int: "integers", float: "numbers"}
MIN_SIMILARITY = 0.7  # of a word to the flag or value that an error suggests


def _name(action: argparse.Action) -> str:
    return action.option_strings[0] if action.option_strings else str(action.metavar or action.dest)


if __name__ == "__main__":
    sys.exit(main())

"""`tok chat`: a conversation in the terminal, with a model loaded here or one behind a URL."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Generator
from contextlib import closing
from typing import Protocol

import tok_client
from tok_core import InvalidField, TokError
from tok_server.talkers import LocalTalker, Message, RemoteTalker

PROMPT = "you> "


class Talker(Protocol):
    """Whoever answers."""

    def reply(self, messages: list[Message]) -> Generator[str]:
        """The answer, piece by piece. Leaving early aborts it."""

    def close(self) -> None:
        """Ends it."""


def main(options: argparse.Namespace) -> int:
    """Talks until the input ends. Errors: InvalidField, TokError."""
    try:
        with closing(_talker(options)) as talker:
            _converse(talker, options.system)
    except tok_client.TokError as error:
        print(f"tok chat: error: {error}", file=sys.stderr)
        return 1
    return 0


def _talker(options: argparse.Namespace) -> LocalTalker | RemoteTalker:
    if options.url is not None:
        _check_remote(options)
        return RemoteTalker(options)
    if options.api_key is not None:
        raise InvalidField("api_key", "***", "only together with --url")
    return LocalTalker(options)


def _check_remote(options: argparse.Namespace) -> None:
    """Raises InvalidField for what only a model loaded here can be told."""
    for name in ("device", "dtype"):
        value = getattr(options, name)
        if value != "auto":
            raise InvalidField(name, value, "auto together with --url: the server has chosen its own")


def _converse(talker: Talker, system: str | None) -> None:
    opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    messages = list(opening)
    while (said := _read()) not in (None, "/exit"):
        if said == "/clear":
            messages = list(opening)
        elif said:
            messages.append({"role": "user", "content": said})
            _answer(talker, messages)


def _read() -> str | None:
    """The next line; None at the end of the input."""
    try:
        return input(PROMPT if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None


def _answer(talker: Talker, messages: list[Message]) -> None:
    """Prints the answer as it comes and adds it to `messages`; a question that fails is taken back."""
    said: list[str] = []
    try:
        with closing(talker.reply(messages)) as pieces:
            for piece in pieces:
                said.append(piece)
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print(" …", end="")
    except (TokError, tok_client.BadRequestError) as error:
        messages.pop()
        print(f"\n{error}\n(/clear begins a new conversation)", file=sys.stderr)
        return
    print(flush=True)
    messages.append({"role": "assistant", "content": "".join(said)})

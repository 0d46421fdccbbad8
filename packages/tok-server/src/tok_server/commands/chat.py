"""`tok chat`: a conversation in the terminal, with a model loaded here or one behind a URL."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Generator
from contextlib import closing
from typing import Protocol

from rich.console import Console

import tok_client
from tok_core import InvalidField, TokError
from tok_server.commands.chat_backends import LocalChatBackend, Message, RemoteChatBackend
from tok_server.commands.dialogue import EXIT, Dialogue

PROMPT = "[bold cyan]you>[/] "
GREETING = "/help lists the commands, /exit or Ctrl-D ends"


class Talker(Protocol):
    """Whoever answers."""

    def reply(self, messages: list[Message]) -> Generator[str]:
        """The answer, piece by piece. Leaving early aborts it."""

    def close(self) -> None:
        """Ends it."""


def main(options: argparse.Namespace) -> int:
    """Talks until the input ends. Errors: InvalidField, TokError."""
    try:
        talker = _talker(options)
    except tok_client.TokError as error:
        print(f"tok chat: error: {_advised(error)}", file=sys.stderr)
        return 1
    with closing(talker):
        converse(talker, Dialogue(options.system), Terminal())
    return 0


class Terminal:
    """Where it is talked: answers go to the output as they are, notes on them to the error output."""

    def __init__(self) -> None:
        self._prompt = Console(highlight=False)
        self._notes = Console(stderr=True, highlight=False, soft_wrap=True)
        self._manual = sys.stdin.isatty()

    def read(self) -> str | None:
        """The next line; None at the end of the input."""
        try:
            return (self._prompt.input(PROMPT) if self._manual else input()).strip()
        except EOFError:
            return None

    def say(self, piece: str) -> None:
        """A piece of an answer."""
        print(piece, end="", flush=True)

    def note(self, text: str, style: str = "dim") -> None:
        """Something that nobody said. Where input comes from a file, only what went wrong is told."""
        if self._manual or style != "dim":
            self._notes.print(text, style=style, markup=False)


def _talker(options: argparse.Namespace) -> LocalChatBackend | RemoteChatBackend:
    if options.url is not None:
        _check_remote(options)
        return RemoteChatBackend(options)
    if options.api_key is not None:
        raise InvalidField("api_key", "***", "only together with --url")
    return LocalChatBackend(options)


def _check_remote(options: argparse.Namespace) -> None:
    """Raises InvalidField for what only a model loaded here can be told."""
    for name in ("device", "dtype"):
        value = getattr(options, name)
        if value != "auto":
            raise InvalidField(name, value, "auto together with --url: the server has chosen its own")


def converse(talker: Talker, dialogue: Dialogue, terminal: Terminal) -> None:
    """Reads, answers and does what commands say until the input ends."""
    terminal.note(GREETING)
    while True:
        try:
            said = terminal.read()
            if said is None or said == EXIT:
                return
            if said.startswith("/"):
                terminal.note(dialogue.command(said))
            elif said:
                _answer(talker, dialogue, terminal, said)
        except KeyboardInterrupt:  # no answer was under way, or it had just ended
            terminal.note("\n/exit or Ctrl-D ends")


def _answer(talker: Talker, dialogue: Dialogue, terminal: Terminal, said: str) -> None:
    """Shows the answer as it comes; a question that fails is taken back. Ctrl-C ends the answer."""
    dialogue.add("user", said)
    answer: list[str] = []
    try:
        with closing(talker.reply(dialogue.messages)) as pieces:
            for piece in pieces:
                answer.append(piece)
                terminal.say(piece)
    except KeyboardInterrupt:
        terminal.say(" …")
    except (TokError, tok_client.TokError) as error:
        dialogue.said.pop()
        terminal.say("\n" if answer else "")
        terminal.note(_advised(error), "red")
        return
    terminal.say("\n")
    dialogue.add("assistant", "".join(answer))


def _advised(error: Exception) -> str:
    """What went wrong, and what may help."""
    match error:
        case tok_client.AuthenticationError():
            return f"{error}\ngive the server's key with --api-key"
        case tok_client.APIConnectionError():
            return f"{error}\nis a server there? `tok serve` starts one; without --url, `tok chat` loads a model itself"
        case tok_client.BadRequestError() | InvalidField():
            return f"{error}\nthe question was taken back; /reset begins a new conversation"
        case _:
            return f"{error}\nthe question was taken back: it can be asked again"

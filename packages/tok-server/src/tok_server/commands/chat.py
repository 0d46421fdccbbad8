"""`tok chat`: a conversation in the terminal, with a model loaded here or one behind a URL."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rich.console import Console

import tok_client
from tok_core import InvalidField, TokError
from tok_server.commands.chat_backends import LocalChatBackend, Message, RemoteChatBackend

PROMPT = "[bold cyan]you>[/] "
GREETING = "/help lists the commands, /exit or Ctrl-D quits"

HELP = """/reset          start a new conversation
/system [TEXT]  start a new conversation with TEXT as system prompt, or without one
/save FILE      write the conversation to FILE, as JSON for the API field `messages`
/help           show this list
/exit           quit, as Ctrl-D does; Ctrl-C only stops an answer"""
EXIT = "/exit"


class ChatBackend(Protocol):
    """Interface of a chat back end."""

    def reply(self, messages: list[Message]) -> Generator[str]:
        """Yield the answer piece by piece. Closing the generator early aborts the request."""

    def close(self) -> None:
        """Release the back end."""


def main(options: argparse.Namespace) -> int:
    """Run the conversation until the input ends. Errors: InvalidField, TokError."""
    try:
        backend = _make_backend(options)
    except tok_client.TokError as error:
        print(f"tok chat: error: {_with_advice(error)}", file=sys.stderr)
        return 1
    with closing(backend):
        converse(backend, Dialogue(options.system), Terminal())
    return 0


class Terminal:
    """The terminal of a chat: answers are written to standard output, notes to standard error."""

    def __init__(self) -> None:
        self._prompt = Console(highlight=False)
        self._notes = Console(stderr=True, highlight=False, soft_wrap=True)
        self._manual = sys.stdin.isatty()

    def read(self) -> str | None:
        """Return the next line; None at the end of the input."""
        try:
            return (self._prompt.input(PROMPT) if self._manual else input()).strip()
        except EOFError:
            return None

    def say(self, piece: str) -> None:
        """Print a piece of an answer."""
        print(piece, end="", flush=True)

    def note(self, text: str, style: str = "dim") -> None:
        """Print a note. Without a terminal as input, notes in the default style are suppressed."""
        if self._manual or style != "dim":
            self._notes.print(text, style=style, markup=False)


def _make_backend(options: argparse.Namespace) -> LocalChatBackend | RemoteChatBackend:
    if options.url is not None:
        _check_remote(options)
        return RemoteChatBackend(options)
    if options.api_key is not None:
        raise InvalidField("api_key", "***", "only together with --url")
    return LocalChatBackend(options)


def _check_remote(options: argparse.Namespace) -> None:
    """Raise InvalidField for flags that apply only to a model loaded here."""
    for name in ("device", "dtype"):
        value = getattr(options, name)
        if value != "auto":
            raise InvalidField(name, value, "auto together with --url: the server chooses it")


def converse(backend: ChatBackend, dialogue: Dialogue, terminal: Terminal) -> None:
    """Read lines, answer them and run commands until the input ends."""
    terminal.note(GREETING)
    while True:
        try:
            user_input = terminal.read()
            if user_input is None or user_input == EXIT:
                return
            if user_input.startswith("/"):
                terminal.note(dialogue.command(user_input))
            elif user_input:
                _answer(backend, dialogue, terminal, user_input)
        except KeyboardInterrupt:  # no answer was under way, or it had just ended
            terminal.note("\n/exit or Ctrl-D quits")


def _answer(backend: ChatBackend, dialogue: Dialogue, terminal: Terminal, user_input: str) -> None:
    """Print the answer as it arrives; Ctrl-C ends it. A question that fails is removed from the dialogue."""
    dialogue.add("user", user_input)
    answer: list[str] = []
    try:
        with closing(backend.reply(dialogue.messages)) as pieces:
            for piece in pieces:
                answer.append(piece)
                terminal.say(piece)
    except KeyboardInterrupt:
        terminal.say(" …")
    except (TokError, tok_client.TokError) as error:
        dialogue.turns.pop()
        terminal.say("\n" if answer else "")
        terminal.note(_with_advice(error), "red")
        return
    terminal.say("\n")
    dialogue.add("assistant", "".join(answer))


def _with_advice(error: Exception) -> str:
    """Return the error's message with advice."""
    match error:
        case tok_client.AuthenticationError():
            return f"{error}\npass the server's key with --api-key"
        case tok_client.APIConnectionError():
            return f"{error}\nno server answers; `tok serve` starts one; without --url, `tok chat` loads a model itself"
        case tok_client.BadRequestError() | InvalidField():
            return f"{error}\nthe question was removed; /reset starts a new conversation"
        case _:
            return f"{error}\nthe question was removed; ask it again"


@dataclass(slots=True)
class Dialogue:
    """A conversation. `system` holds instructions that precede it."""

    system: str | None = None
    turns: list[Message] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        """Return the messages to send to the model."""
        opening: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        return opening + self.turns

    def add(self, role: str, content: str) -> None:
        """Append a message."""
        self.turns.append({"role": role, "content": content})

    def command(self, line: str) -> str:
        """Run a line that begins with "/". Returns the text to show."""
        name, _, rest = line.partition(" ")
        handler = self._commands().get(name)
        if handler is None:
            return f"command {name} does not exist; the commands are:\n{HELP}"
        return handler(rest.strip())

    def _commands(self) -> dict[str, Callable[[str], str]]:
        return {"/reset": self._reset, "/system": self._set_system, "/save": self._save, "/help": lambda _: HELP}

    def _reset(self, _: str) -> str:
        self.turns.clear()
        return "started a new conversation"

    def _set_system(self, text: str) -> str:
        self.system = text or None
        self.turns.clear()
        return (
            "started a new conversation with these instructions"
            if text
            else "started a new conversation without instructions"
        )

    def _save(self, name: str) -> str:
        if not name:
            return "/save needs a file name: /save talk.json"
        try:
            with Path(name).expanduser().open("x", encoding="utf-8") as file:
                json.dump(self.messages, file, ensure_ascii=False, indent=2)
        except FileExistsError:
            return f"{name} already exists; choose another file"
        except OSError as error:
            return f"{name} cannot be written: {error.strerror}"
        return f"{len(self.messages)} messages in {name}"

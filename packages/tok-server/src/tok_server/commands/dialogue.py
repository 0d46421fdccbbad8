"""The messages of a terminal chat, and the slash commands that change them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tok_server.commands.chat_backends import Message

HELP = """/reset          start a new conversation
/system [TEXT]  start a new conversation with TEXT as system prompt, or without one
/save FILE      write the conversation to FILE, as JSON for the API field `messages`
/help           show this list
/exit           quit, as Ctrl-D does; Ctrl-C only stops an answer"""
EXIT = "/exit"


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

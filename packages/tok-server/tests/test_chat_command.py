"""`tok chat`: its commands, what Ctrl-C stops, and what it says when something goes wrong."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from support.gates import Gate, gated
from support.patience import PATIENCE, wait_until
from support.scripted_model import make_scripted_model
from support.serving import Server, serving
from tok_core import AsyncEngine
from tok_server.cli import main, make_parser
from tok_server.commands import chat_backends
from tok_server.commands.chat import Terminal, converse
from tok_server.commands.chat_backends import LocalChatBackend
from tok_server.commands.dialogue import Dialogue

WORDS = [f"w{number}. " for number in range(1, 61)]


def test_reset_forgets_what_was_said_and_system_begins_anew() -> None:
    dialogue = Dialogue("be brief")
    dialogue.add("user", "hello")
    assert dialogue.command("/reset") == "a new conversation"
    assert dialogue.messages == [{"role": "system", "content": "be brief"}]
    dialogue.add("user", "hello")
    assert "these instructions" in dialogue.command("/system count in  threes")
    assert dialogue.messages == [{"role": "system", "content": "count in  threes"}]
    assert "without" in dialogue.command("/system")
    assert dialogue.messages == []


def test_save_writes_the_messages_once_and_overwrites_nothing(tmp_path: Path) -> None:
    dialogue = Dialogue()
    dialogue.add("user", "häh?")
    dialogue.add("assistant", "yes")
    file = tmp_path / "talk.json"
    assert dialogue.command(f"/save {file}") == f"2 messages in {file}"
    assert json.loads(file.read_text()) == dialogue.messages
    assert "is there already; name another" in dialogue.command(f"/save {file}")
    assert "cannot be written: No such file" in dialogue.command("/save /no/such/place/x")
    assert "/save talk.json" in dialogue.command("/save")


def test_an_unknown_command_is_told_those_there_are() -> None:
    told = Dialogue().command("/rest")
    assert "no command /rest" in told
    assert all(name in told for name in ("/reset", "/system", "/save", "/exit"))


def test_without_a_server_it_says_how_to_get_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:9/v1"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("tok chat: error: ")
    assert "`tok serve` starts one" in error


@pytest.fixture(scope="module")
def guarded(tiny_model: Path) -> Iterator[Server]:
    with serving(tiny_model, api_key="secret") as running:
        yield running


def test_without_the_key_it_says_where_to_give_it(guarded: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", guarded.url]) == 1
    assert "--api-key" in capsys.readouterr().err


class Session:
    """`tok chat` in a terminal of its own. What it shows is read in a thread."""

    def __init__(self, arguments: list[str]) -> None:
        self._ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "tok_server.cli", "chat", *arguments]
        self.popen = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
        os.close(theirs)
        self.shown = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def type(self, text: str) -> None:
        """What is typed."""
        os.write(self._ours, text.encode())

    def close(self) -> None:
        """Ends it, whatever it does."""
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()
        self._reader.join()
        os.close(self._ours)

    def _read(self) -> None:
        try:
            while piece := os.read(self._ours, 4096):
                self.shown += piece
        except OSError:  # the other side has closed
            pass


@pytest.fixture(scope="module")
def reciting_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answer to `recite` is sixty words."""
    template = "{% if messages %}{{ messages[-1].content }}{% endif %}"
    return make_scripted_model(tmp_path_factory.mktemp("recite") / "model", {"recite": WORDS}, template)


@pytest.fixture(scope="module")
def reciting(reciting_model: Path) -> Iterator[Server]:
    """A server of that model."""
    with serving(reciting_model) as running:
        yield running


def test_ctrl_c_stops_an_answer_and_not_the_conversation(reciting: Server) -> None:
    session = Session(["--url", reciting.url])
    try:
        wait_until(lambda: session.shown.count(b"you>") == 1)
        with gated(reciting.engine, steps=20):
            session.type("recite\n")
            wait_until(lambda: b"w1." in session.shown)
            session.popen.send_signal(signal.SIGINT)
            wait_until(lambda: session.shown.count(b"you>") == 2)
            assert " …\r\n".encode() in session.shown
            wait_until(lambda: reciting.engine.open_requests == 0)  # in the middle of the answer
        assert b"w30." not in session.shown
        session.type("/system be kind\n")
        wait_until(lambda: b"with these instructions" in session.shown)
        session.type("/exit\n")
        assert session.popen.wait(PATIENCE) == 0
    finally:
        session.close()


class ScriptedTerminal(Terminal):
    """Says what a test says, and shows what it is shown to the test."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = iter(lines)
        self.shown: list[str] = []
        self.begun = threading.Event()  # a piece of an answer has been shown

    def read(self) -> str | None:
        return next(self._lines, None)

    def say(self, piece: str) -> None:
        self.shown.append(piece)
        self.begun.set()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, whatever runs the tests."""
    assert threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_stops_the_answer_of_a_model_loaded_here_though_nothing_wakes_its_reader(
    reciting_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes to another thread, as one does that comes just before a wait: it does not end the wait."""
    monkeypatch.setattr(chat_backends, "AsyncEngine", partial(AsyncEngine, in_process=True))
    options = make_parser(["chat"]).parse_args(["chat", str(reciting_model), "--device", "cpu"])
    talker, terminal, dialogue = LocalChatBackend(options), ScriptedTerminal(["recite", "recite"]), Dialogue()
    interrupted, in_time = threading.Event(), list[bool]()

    def interrupt(gate: Gate) -> None:
        assert terminal.begun.wait(PATIENCE)
        assert gate.reached.wait(PATIENCE)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        in_time.append(interrupted.wait(PATIENCE))
        gate.open()

    say = terminal.say

    def saying(piece: str) -> None:
        say(piece)
        if piece == " …":
            wait_until(lambda: talker._engine.open_requests == 0)  # in the middle of the answer
            interrupted.set()

    monkeypatch.setattr(terminal, "say", saying)
    with closing(talker), gated(talker._engine, steps=20) as gate:
        thread = threading.Thread(target=interrupt, args=[gate])
        thread.start()
        converse(talker, dialogue, terminal)
        thread.join()
    assert in_time == [True]
    first, second = (message["content"] for message in dialogue.messages if message["role"] == "assistant")
    assert "".join(WORDS).startswith(first)
    assert first.startswith(WORDS[0])
    assert WORDS[30] not in first
    assert second == "".join(WORDS)

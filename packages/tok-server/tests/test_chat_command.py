"""`tok chat`: commands, Ctrl-C and error messages."""

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

from support.patience import PATIENCE, wait_until
from support.paused_engine import Gate, gated
from support.scripted_model import make_scripted_model
from support.serving import Server, serving
from support.tiny_models import make_model
from tok_core import AsyncEngine, ModelError
from tok_server.cli import main, make_parser
from tok_server.commands import chat_backends
from tok_server.commands.chat import Dialogue, Terminal, converse
from tok_server.commands.chat_backends import LocalChatBackend

WORDS = [f"w{number}. " for number in range(1, 61)]


def test_reset_and_system_commands_start_a_new_conversation() -> None:
    dialogue = Dialogue("be brief")
    dialogue.add("user", "hello")
    assert dialogue.command("/reset") == "started a new conversation"
    assert dialogue.messages == [{"role": "system", "content": "be brief"}]
    dialogue.add("user", "hello")
    assert "these instructions" in dialogue.command("/system count in  threes")
    assert dialogue.messages == [{"role": "system", "content": "count in  threes"}]
    assert "without" in dialogue.command("/system")
    assert dialogue.messages == []


def test_save_command_writes_messages_and_refuses_to_overwrite(tmp_path: Path) -> None:
    dialogue = Dialogue()
    dialogue.add("user", "häh?")
    dialogue.add("assistant", "yes")
    file = tmp_path / "talk.json"
    assert dialogue.command(f"/save {file}") == f"2 messages in {file}"
    assert json.loads(file.read_text()) == dialogue.messages
    assert "already exists; choose another" in dialogue.command(f"/save {file}")
    assert "cannot be written: No such file" in dialogue.command("/save /no/such/place/x")
    assert "/save talk.json" in dialogue.command("/save")


def test_unknown_chat_command_lists_the_known_commands() -> None:
    told = Dialogue().command("/rest")
    assert "command /rest does not exist" in told
    assert all(name in told for name in ("/reset", "/system", "/save", "/exit"))


def test_chat_without_a_server_says_how_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:9/v1"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("tok chat: error: ")
    assert "`tok serve` starts one" in error


@pytest.fixture(scope="module")
def keyed_server(tiny_model: Path) -> Iterator[Server]:
    with serving(tiny_model, api_key="secret") as running:
        yield running


def test_chat_without_the_api_key_names_the_flag(keyed_server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    for url in (keyed_server.url, keyed_server.url.removesuffix("/v1")):
        assert main(["chat", "--url", url]) == 1
        assert "--api-key" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["secret\n", "schlüssel"])
def test_chat_refuses_an_api_key_that_no_header_can_hold(capsys: pytest.CaptureFixture[str], key: str) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:9/v1", "--api-key", key]) == 2
    assert capsys.readouterr().err == "tok chat: error: --api-key is '***'; allowed: printable ASCII\n"


class Session:
    """`tok chat` in a terminal of its own, whose output a thread reads."""

    def __init__(self, arguments: list[str]) -> None:
        self._ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "tok_server.cli", "chat", *arguments]
        self.popen = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
        os.close(theirs)
        self.shown = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def type(self, text: str) -> None:
        """Type `text` into the terminal."""
        os.write(self._ours, text.encode())

    def close(self) -> None:
        """End the process, whatever it does."""
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
    """A server of the reciting model."""
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
    """A terminal that reads given lines and records the shown pieces."""

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
    """Let Ctrl-C raise KeyboardInterrupt, whatever runs the tests."""
    assert threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_stops_a_local_models_answer_while_its_reader_waits(
    reciting_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal goes to another thread and, like a signal just before a wait, does not end the wait."""
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


@pytest.mark.parametrize(
    ("file", "lacking"), [("tokenizer.json", "usable tokenizer"), ("tokenizer_config.json", "chat template")]
)
def test_chat_names_what_a_model_lacks(
    file: str, lacking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_backends, "AsyncEngine", partial(AsyncEngine, in_process=True))
    path = make_model("llama", tmp_path / "model")
    (path / file).unlink()
    options = make_parser(["chat"]).parse_args(["chat", str(path), "--device", "cpu"])
    with pytest.raises(ModelError, match=f"model '.*': has no {lacking}, which a chat needs"):
        LocalChatBackend(options)

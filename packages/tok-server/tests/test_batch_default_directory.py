"""Files and batches without --data-dir: kept in the user's data directory, off if it cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.serving import serving
from tok_server import Settings
from tok_server.cli import make_parser
from tok_server.flags import server_settings
from tok_server.flags.server_flags import default_data_directory


def settings_of(*words: str) -> Settings:
    return server_settings(make_parser().parse_args(["serve", "owner/name", *words]))


def test_default_directory_is_that_of_the_user_and_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert default_data_directory("owner/name") == "/data/tok/batches--owner--name"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("HOME", "/home/me")
    assert default_data_directory("..") == "/home/me/.local/share/tok/batches--.."
    monkeypatch.setattr("sys.platform", "darwin")
    assert default_data_directory("a") == "/home/me/Library/Application Support/tok/batches--a"
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    assert default_data_directory("a") is None


def test_flags_choose_the_directory_and_whether_it_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    default = settings_of()
    assert (default.data_dir, default.require_data_dir) == ("/data/tok/batches--owner--name", False)
    assert settings_of("--served-model-name", "a", "b").data_dir == "/data/tok/batches--a"
    given = settings_of("--data-dir", "here")
    assert (given.data_dir, given.require_data_dir) == ("here", True)
    assert settings_of("--no-batches").data_dir is None
    assert settings_of("--no-batches", "--data-dir", "here").data_dir is None


def test_second_server_on_the_default_directory_says_why_it_has_no_batches(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = str(tmp_path / "tok" / "batches--tiny")
    caplog.set_level("INFO", "tok.server")
    with serving(tiny_model, data_dir=directory, require_data_dir=False) as first:
        assert f"files and batches are kept in {directory}" in caplog.messages
        with serving(tiny_model, data_dir=directory, require_data_dir=False) as second:
            answer = second.call("GET", "/v1/files")
            assert answer.status == 501
            assert f"directory {directory} is in use by another tok process" in str(answer.error()["message"])
            assert sum(text.startswith("files and batches are off: data directory") for text in caplog.messages) == 1
            assert second.call("GET", "/metrics").status == 200
            assert second.call("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1}).status == 200
        assert first.call("GET", "/v1/files").status == 200


def test_default_directory_that_cannot_be_created_turns_batches_off(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with serving(tiny_model, data_dir=str(tmp_path / "file" / "tok"), require_data_dir=False) as server:
        answer = server.call("GET", "/v1/batches")
        assert answer.status == 501
        assert "cannot be created" in str(answer.error()["message"])

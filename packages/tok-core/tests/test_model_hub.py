"""`resolve` finds a model on disk, in the cache or on a hub (here a small test server), or names the failure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from huggingface_hub import constants

from support.tiny_models import make_model
from tok_core.errors import ModelError
from tok_core.model_config.hub import resolve, resolve_tokenizer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "owner/tiny"
REFUSALS = {
    "owner/gated": (403, "GatedRepo"),
    "owner/absent": (404, "RepoNotFound"),
    "owner/broken": (409, ""),
}


class Hub(ThreadingHTTPServer):
    """Serves one directory as REPOSITORY by the hub's protocol, and refuses the names in REFUSALS."""

    daemon_threads = True

    def __init__(self, directory: Path) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.directory = directory
        self.served: list[str] = []
        self.asked: list[str] = []
        self.refused_files: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        for name, (status, code) in REFUSALS.items():
            if name in self.path:
                return self.answer(status, b"{}", {"X-Error-Code": code})
        if self.path.startswith(f"/api/models/{REPOSITORY}/"):
            return self.answer(200, self.listing())
        file = self.server.directory / self.path.rpartition(f"/resolve/{COMMIT}/")[2]
        if not file.is_file():
            return self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        content = file.read_bytes()
        etag = hashlib.sha1(content).hexdigest()
        if self.command == "GET" and file.name in self.server.refused_files:
            return self.answer(409, b"{}")
        if self.command == "GET":
            self.server.served.append(file.name)
        return self.answer(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})

    do_HEAD = do_GET

    def listing(self) -> bytes:
        """Return the repository's description or its file list, as the path asks."""
        files = sorted(p.relative_to(self.server.directory) for p in self.server.directory.rglob("*") if p.is_file())
        if "/tree/" in self.path:
            tree = [{"type": "file", "path": str(f), "size": 1, "oid": COMMIT} for f in files]
            return json.dumps(tree).encode()
        siblings = [{"rfilename": str(file)} for file in files]
        return json.dumps({"id": REPOSITORY, "sha": COMMIT, "siblings": siblings}).encode()

    def answer(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing; tests read `served` instead."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of an empty hub cache for this test."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def hub(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    directory = make_model("llama", tmp_path / "hub", shards=2)
    (directory / "modeling_own.py").write_text("raise SystemExit")
    (directory / "pytorch_model.bin").write_bytes(b"pickle")
    (directory / "original").mkdir()
    (directory / "original" / "params.json").write_text("{}")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    with Hub(directory) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_resolve_returns_a_local_directory_as_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_model("llama", tmp_path / "owner" / "tiny")
    assert resolve(str(path)) == path
    monkeypatch.chdir(tmp_path)
    assert resolve("owner/tiny") == path
    assert resolve("./owner/tiny") == path


def test_resolve_expands_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = make_model("llama", tmp_path / "model")
    assert resolve("~/model") == path


def test_directory_without_config_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"directory {tmp_path}: has no config\.json"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("model", ["/no/such/place", "./none", "../none", "~/none-such", ""])
def test_missing_path_is_not_searched_on_the_hub(model: str, cache: Path) -> None:
    with pytest.raises(ModelError, match=r"is no directory; allowed: a directory or a hub id"):
        resolve(model)


def test_resolve_rejects_a_file(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"model\.gguf': is no directory"):
        resolve(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize("model", ["a/b/c", "owner/na me", "owner/.."])
def test_a_malformed_hub_id_is_named(model: str, cache: Path) -> None:
    with pytest.raises(ModelError, match=r"as a hub id it is malformed; allowed: \"owner/name\""):
        resolve(model)


def test_revision_and_tokenizer_are_what_the_hub_is_asked_for(hub: Hub, cache: Path) -> None:
    path = resolve(REPOSITORY, revision="some-tag")
    assert any("/revision/some-tag" in asked for asked in hub.asked)
    assert (path / "config.json").is_file()
    hub.served.clear()
    words = resolve_tokenizer(REPOSITORY, str(cache / "other"))
    assert set(hub.served) == {file.name for file in words.rglob("*") if file.is_file()}
    assert set(hub.served) == {"tokenizer.json", "tokenizer_config.json", "tool_use.jinja"}


def test_a_repository_is_downloaded_once_without_code_and_pickles(hub: Hub, cache: Path) -> None:
    path = resolve(REPOSITORY)
    assert {file.name for file in path.rglob("*") if file.is_file()} == set(hub.served)
    assert (path / "additional_chat_templates" / "tool_use.jinja").is_file()
    assert sorted(hub.served) == [
        "config.json",
        "generation_config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "tool_use.jinja",
    ]
    hub.served.clear()
    assert resolve(REPOSITORY) == path
    assert hub.served == []


def test_downloads_are_stored_in_the_data_directory(hub: Hub, cache: Path, tmp_path: Path) -> None:
    path = resolve(REPOSITORY, str(tmp_path / "data"))
    assert path.is_relative_to(tmp_path / "data" / "models")
    assert not cache.exists() or not list(cache.rglob("*.safetensors"))


def test_a_cached_repository_needs_no_hub(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = resolve(REPOSITORY)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve(REPOSITORY) == path


def test_uncached_repository_while_offline_is_an_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"'owner/tiny'.* it is not cached, and the hub does not answer"):
        resolve(REPOSITORY)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("owner/gated", "as a hub id it is gated: accept its terms there, then set HF_TOKEN"),
        ("owner/absent", "as a hub id it is not found; a private repository needs HF_TOKEN"),
        ("owner/broken", "as a hub id it is not cached, and the hub does not answer: .*409"),
    ],
)
def test_hub_refusal_is_explained_in_the_error(model: str, message: str, hub: Hub, cache: Path) -> None:
    with pytest.raises(ModelError, match=f"model '{model}': .*{message}"):
        resolve(model)


def test_repository_without_config_json_is_named(hub: Hub, cache: Path) -> None:
    (hub.directory / "config.json").unlink()
    with pytest.raises(ModelError, match=rf"hub repository {REPOSITORY}: has no config\.json"):
        resolve(REPOSITORY)


def test_unsupported_model_is_refused_before_its_weights_are_downloaded(hub: Hub, cache: Path) -> None:
    config = json.loads((hub.directory / "config.json").read_text())
    (hub.directory / "config.json").write_text(json.dumps({**config, "architectures": ["Phi3ForCausalLM"]}))
    with pytest.raises(ModelError, match=r"config\.json: architectures is \['Phi3ForCausalLM'\]; allowed: Llama"):
        resolve(REPOSITORY)
    assert hub.served == ["config.json"]


def test_failed_download_names_the_file_in_the_error(hub: Hub, cache: Path) -> None:
    hub.refused_files.add("model-00002-of-00002.safetensors")
    with pytest.raises(ModelError, match=r"as a hub id its download failed: .*409.*model-00002"):
        resolve(REPOSITORY)

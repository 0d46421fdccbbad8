"""Files and batches of several API keys on one server, and the disk quota that they share."""

from __future__ import annotations

import gzip
import json
import resource
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.batching import completion_line, jsonl
from support.serving import Answer, Server, serving, wait_until
from tok_server.batch.storage import database, store

ONE, OTHER = ({"Authorization": f"Bearer {key}"} for key in ("one-secret", "other-secret"))
QUOTA = 4 << 20
ENDED = ("completed", "failed", "expired", "cancelled")


@pytest.fixture(scope="module")
def keyed_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = str(tmp_path_factory.mktemp("data"))
    with serving(tiny_model, data_dir=directory, api_keys=("one-secret", "other-secret"), data_quota=QUOTA) as running:
        yield running


def upload(server: Server, data: bytes, headers: dict[str, str], *, packed: bool = False) -> Answer:
    parts = [("purpose", b"batch"), ('file"; filename="in.jsonl', data)]
    body = (
        b"".join(
            b'--x\r\nContent-Disposition: form-data; name="%s"\r\n\r\n' % name.encode() + value + b"\r\n"
            for name, value in parts
        )
        + b"--x--\r\n"
    )
    named = {"Content-Type": "multipart/form-data; boundary=x", **headers}
    if packed:
        body, named = gzip.compress(body), named | {"Content-Encoding": "gzip"}
    return server.call("POST", "/v1/files", body, named)


def create_batch(server: Server, file: object, headers: dict[str, str]) -> Answer:
    body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    return server.call("POST", "/v1/batches", body, headers)


def ids(server: Server, kind: str, headers: dict[str, str]) -> set[object]:
    found = server.call("GET", f"/v1/{kind}", headers=headers).json()["data"]
    assert isinstance(found, list)
    return {one["id"] for one in found}


def batch_of(server: Server, headers: dict[str, str]) -> dict[str, object]:
    """Create a batch, wait for its end and return it."""
    file = upload(server, jsonl(completion_line(number) for number in range(3)), headers).json()["id"]
    id = create_batch(server, file, headers).json()["id"]
    path = f"/v1/batches/{id}"
    wait_until(lambda: server.call("GET", path, headers=headers).json()["status"] in ENDED)
    return server.call("GET", path, headers=headers).json()


def test_files_and_batches_of_a_key_are_hidden_from_other_keys(keyed_server: Server) -> None:
    batches = {name: batch_of(keyed_server, headers) for name, headers in (("one", ONE), ("other", OTHER))}
    for own, foreign, headers in (("one", "other", ONE), ("other", "one", OTHER)):
        mine, hidden = batches[own], batches[foreign]
        assert mine["status"] == "completed"
        assert ids(keyed_server, "batches", headers) == {mine["id"]}
        assert ids(keyed_server, "files", headers) == {mine["input_file_id"], mine["output_file_id"]}
        for file in (hidden["input_file_id"], hidden["output_file_id"]):
            for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
                answers = [
                    keyed_server.call(method, f"/v1/files/{id}{path}", headers=headers)
                    for id in (file, "file-" + 24 * "0")
                ]
                assert [answer.status for answer in answers] == [404, 404]
                found, missing = (json.dumps(answer.error()) for answer in answers)
                assert found.replace(str(file), "") == missing.replace("file-" + 24 * "0", "")
            assert keyed_server.call("GET", f"/v1/files?after={file}", headers=headers).status == 400
            refused = create_batch(keyed_server, file, headers)
            assert (refused.status, refused.error()["param"]) == (400, "input_file_id")
        for method, path in (("GET", ""), ("POST", "/cancel")):
            assert keyed_server.call(method, f"/v1/batches/{hidden['id']}{path}", headers=headers).status == 404
        assert keyed_server.call("GET", f"/v1/batches?after={hidden['id']}", headers=headers).status == 400


def test_api_keys_are_not_stored_on_disk(keyed_server: Server) -> None:
    upload(keyed_server, b"x", ONE)
    found = [
        path.read_bytes() for path in Path(str(keyed_server.context.settings.data_dir)).rglob("*") if path.is_file()
    ]
    assert not any(key in data for data in found for key in (b"one-secret", b"other-secret"))


def test_owners_survive_restarts_and_files_without_owner_are_shared(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tiny_model, data_dir=str(tmp_path)) as before:
        common = upload(before, b"x", {}).json()["id"]
    with serving(tiny_model, data_dir=str(tmp_path), api_keys=("one-secret", "other-secret")) as between:
        own = upload(between, b"y", ONE).json()["id"]
        assert ids(between, "files", ONE) == {common, own}
    with serving(tiny_model, data_dir=str(tmp_path), api_keys=("new-secret", "other-secret", "one-secret")) as after:
        assert ids(after, "files", ONE) == {common, own}
        assert ids(after, "files", OTHER) == {common}
    with serving(tiny_model, data_dir=str(tmp_path)) as without:
        assert ids(without, "files", {}) == {common}


def test_uploads_beyond_the_quota_are_refused_until_files_are_deleted(keyed_server: Server) -> None:
    quota = keyed_server.context.settings.data_quota
    assert quota == QUOTA
    assert (answer := upload(keyed_server, bytes(QUOTA + 1), ONE)).status == 413
    assert "--data-quota" in str(answer.error()["message"])
    first = upload(keyed_server, bytes(QUOTA // 2), ONE)
    refused = upload(keyed_server, bytes(QUOTA // 2), OTHER)
    assert (first.status, refused.status, refused.error()["code"]) == (200, 507, "data_quota")
    assert refused.headers["x-should-retry"] == "false"
    assert keyed_server.call("DELETE", f"/v1/files/{first.json()['id']}", headers=ONE).status == 200
    again = upload(keyed_server, bytes(QUOTA // 2), OTHER)
    assert again.status == 200
    assert keyed_server.call("DELETE", f"/v1/files/{again.json()['id']}", headers=OTHER).status == 200


def test_compressed_upload_is_accepted_unless_a_decompression_bomb(keyed_server: Server) -> None:
    lines = jsonl(completion_line(number) for number in range(20_000))
    assert upload(keyed_server, lines, ONE, packed=True).json()["bytes"] == len(lines)
    answer = upload(keyed_server, bytes(QUOTA // 4 + (1 << 20)), ONE, packed=True)
    assert (answer.status, answer.error()["code"]) == (413, "compression_ratio")
    assert "100 times" in str(answer.error()["message"])


def test_highly_compressed_json_body_is_not_refused_as_a_bomb(keyed_server: Server) -> None:
    body = gzip.compress(json.dumps({"model": "tiny", "prompt": "a" + 1_040_000 * " ", "max_tokens": 1}).encode())
    headers = ONE | {"Content-Encoding": "gzip"}
    # The body is read, and its prompt is too long.
    assert keyed_server.call("POST", "/v1/completions", body, headers).status == 400


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Make the system refuse to grow any file of this process beyond `size`, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_upload_to_a_full_disk_gets_507_and_leaves_no_file(keyed_server: Server) -> None:
    files = Path(str(keyed_server.context.settings.data_dir)) / "files"
    before = {path.name for path in files.iterdir()}
    with files_of_at_most(200_000):
        answer = upload(keyed_server, bytes(1_000_000), ONE)
    assert (answer.status, answer.error()["code"], answer.error()["type"]) == (507, "disk_full", "server_error")
    assert {path.name for path in files.iterdir()} == before


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
def test_full_index_database_gets_507(keyed_server: Server, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes from SQLite itself, whose file may not grow."""
    data = jsonl([completion_line(0)])
    file = upload(keyed_server, data, ONE).json()["id"]

    @contextmanager
    def full(connection: sqlite3.Connection) -> Iterator[None]:
        with database.transaction(connection):
            connection.execute("PRAGMA max_page_count = 1")  # SQLite takes the current size if that is larger
            try:
                connection.execute("CREATE TABLE filler AS SELECT zeroblob(1000000)")
            finally:
                connection.execute("PRAGMA max_page_count = 1073741823")
            yield

    with monkeypatch.context() as patch:
        patch.setattr(store, "transaction", full)
        answer = upload(keyed_server, data, ONE) if path == "/v1/files" else create_batch(keyed_server, file, ONE)
    assert (answer.status, answer.error()["code"]) == (507, "disk_full")
    with sqlite3.connect(Path(str(keyed_server.context.settings.data_dir)) / "batches.sqlite") as connection:
        assert connection.execute("PRAGMA quick_check").fetchone() == ("ok",)

"""/v1/files and /v1/batches through the `openai` package, and the requests they refuse."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from openai.types import Batch, FileDeleted, FileObject
from pydantic import BaseModel

from support.batching import Line, assert_each_once, chat_line, completion_line, jsonl, read_jsonl
from support.patience import PATIENCE, wait_until
from support.serving import Server, serving
from tok_client import types as wire

ENDED = ("completed", "failed", "expired", "cancelled")


@pytest.fixture(scope="module")
def batch_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tiny_model, data_dir=str(tmp_path_factory.mktemp("data")), max_file=1 << 20) as running:
        yield running


@pytest.fixture
def client(batch_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=batch_server.url, api_key="key", max_retries=0) as found:
        yield found


def check_valid(found: BaseModel) -> None:
    """Validate `found` strictly as sent, because the openai package builds its objects without validation."""
    type(found).model_validate(found.model_dump(exclude_unset=True), strict=True)


def upload(client: openai.OpenAI, data: bytes) -> FileObject:
    return client.files.create(file=("in.jsonl", data), purpose="batch")


def create_batch(client: openai.OpenAI, data: bytes, endpoint: str = "/v1/completions") -> Batch:
    return client.batches.create(
        input_file_id=upload(client, data).id,
        endpoint=endpoint,  # type: ignore[arg-type]
        completion_window="24h",
    )


def wait_for_end(client: openai.OpenAI, batch: Batch) -> Batch:
    deadline = time.monotonic() + PATIENCE
    while (found := client.batches.retrieve(batch.id)).status not in ENDED:
        assert time.monotonic() < deadline, found.status
        time.sleep(0.02)
    return found


def content(client: openai.OpenAI, id: str | None) -> bytes:
    return b"" if id is None else client.files.content(id).read()


def test_file_is_created_retrieved_listed_read_and_deleted(client: openai.OpenAI) -> None:
    data = jsonl([completion_line(1)])
    made = client.files.create(
        file=("naïve\n.jsonl", data), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    check_valid(made)
    assert (made.bytes, made.purpose, made.object) == (len(data), "batch", "file")
    assert made.expires_at == made.created_at + 3600
    assert client.files.retrieve(made.id) == made
    assert made in list(client.files.list(purpose="batch"))
    assert client.files.content(made.id).read() == data
    assert client.files.delete(made.id) == FileDeleted(id=made.id, deleted=True, object="file")
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        client.files.content(made.id)
    with pytest.raises(openai.NotFoundError):
        client.files.delete(made.id)


def test_file_list_is_paginated_in_either_order(client: openai.OpenAI) -> None:
    made = [upload(client, b"%d" % number).id for number in range(5)]
    pages = list(client.files.list(limit=2, order="asc").iter_pages())
    assert all(len(page.data) <= 2 for page in pages)
    listed_file_ids = [file.id for page in pages for file in page.data]
    assert listed_file_ids[-5:] == made
    assert [file.id for file in client.files.list()] == listed_file_ids[::-1]
    assert not list(client.files.list(purpose="batch_output_of_nobody"))
    for id in made:
        client.files.delete(id)


def test_batch_answers_equal_those_of_direct_chat_requests(batch_server: Server, client: openai.OpenAI) -> None:
    lines = [chat_line(number, seed=1, n=1 + number % 3, temperature=0.8) for number in range(20)]
    batch = client.batches.create(
        input_file_id=upload(client, jsonl(lines)).id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"of": "a test"},
        output_expires_after={"anchor": "created_at", "seconds": 7200},
    )
    check_valid(batch)
    assert batch.status == "validating"
    found = wait_for_end(client, batch)
    check_valid(found)
    assert (found.status, found.metadata, found.error_file_id) == ("completed", {"of": "a test"}, None)
    assert found.request_counts is not None
    assert found.request_counts.model_dump() == {"total": 20, "completed": 20, "failed": 0}
    times = [found.created_at, found.in_progress_at, found.finalizing_at, found.completed_at]
    assert times == sorted(times, key=lambda one: one or 0)
    assert found.expires_at == found.created_at + 86_400
    output = client.files.retrieve(str(found.output_file_id))
    assert (output.purpose, output.expires_at) == ("batch_output", output.created_at + 7200)
    data = content(client, found.output_file_id)
    assert_each_once(lines, data)
    prompt = completion = 0
    for line, answer in zip(lines, wire_lines(data), strict=True):
        assert answer.response is not None
        direct = batch_server.call("POST", "/v1/chat/completions", line["body"]).json()
        assert answer.response.status_code == 200
        assert answer.response.body["choices"] == direct["choices"]
        usage = answer.response.body["usage"]
        assert isinstance(usage, dict)
        prompt += usage["prompt_tokens"]
        completion += usage["completion_tokens"]
    assert found.usage is not None
    assert (found.usage.input_tokens, found.usage.output_tokens) == (prompt, completion)
    assert found.usage.total_tokens == prompt + completion


def wire_lines(data: bytes) -> list[wire.BatchAnswer]:
    import msgspec

    return [msgspec.json.decode(line, type=wire.BatchAnswer) for line in data.splitlines()]


def test_batch_of_responses_equals_direct_responses_requests(batch_server: Server, client: openai.OpenAI) -> None:
    body = {"model": "tiny", "input": "the dogs", "max_output_tokens": 5, "temperature": 0}
    lines: list[Line] = [
        {"custom_id": f"line {number}", "method": "POST", "url": "/v1/responses", "body": {**body, "user": str(number)}}
        for number in range(3)
    ]
    lines.append({"custom_id": "bad", "method": "POST", "url": "/v1/responses", "body": {**body, "stream": True}})
    found = wait_for_end(client, create_batch(client, jsonl(lines), "/v1/responses"))
    output, errors = content(client, found.output_file_id), content(client, found.error_file_id)
    assert_each_once(lines, output, errors)
    assert [line["custom_id"] for line in read_jsonl(errors)] == ["bad"]
    direct = batch_server.call("POST", "/v1/responses", body).json()
    for answer in wire_lines(output):
        assert answer.response is not None
        made = answer.response.body
        assert made["object"] == "response"
        assert made["output"][0]["content"] == direct["output"][0]["content"]  # type: ignore[index]
    used = direct["usage"]
    assert isinstance(used, dict)
    assert found.usage is not None
    told = (found.usage.input_tokens, found.usage.output_tokens)
    assert told == (3 * used["input_tokens"], 3 * used["output_tokens"]) > (0, 0)


def test_metrics_count_ended_batches_and_answered_lines(batch_server: Server, client: openai.OpenAI) -> None:
    before = figures(batch_server)
    wait_for_end(client, create_batch(client, jsonl([completion_line(0), completion_line(1), completion_line(2, n=0)])))
    name = 'tok_batches_ended_total{status="completed"}'
    wait_until(lambda: figures(batch_server)[name] == before[name] + 1)
    after = figures(batch_server)
    assert {name: after[name] - before[name] for name in after if after[name] != before[name]} == {
        'tok_batches_ended_total{status="completed"}': 1,
        'tok_batch_lines_answered_total{result="completed"}': 2,
        'tok_batch_lines_answered_total{result="failed"}': 1,
    }
    assert after['tok_batch_lines{state="waiting"}'] == after['tok_batch_lines{state="running"}'] == 0


def figures(server: Server) -> dict[str, float]:
    text = server.call("GET", "/metrics").body.decode()
    found = [line.split() for line in text.splitlines() if line.startswith("tok_batch")]
    return {name: float(value) for name, value in found}


def test_invalid_body_fails_only_its_batch_line(client: openai.OpenAI) -> None:
    lines = [completion_line(number) for number in range(9)]
    lines[2] = completion_line(2, temperature=-1)
    lines[4] = completion_line(4, model="another")
    lines[6] = completion_line(6, stream=True)
    lines[7] = {**completion_line(7), "body": {}}
    found = wait_for_end(client, create_batch(client, jsonl(lines)))
    assert found.status == "completed"
    assert found.request_counts is not None
    assert found.request_counts.model_dump() == {"total": 9, "completed": 5, "failed": 4}
    output, errors = content(client, found.output_file_id), content(client, found.error_file_id)
    assert_each_once(lines, output, errors)
    statuses, params = [], []
    for answer in wire_lines(errors):
        assert answer.response is not None
        statuses.append(answer.response.status_code)
        error = answer.response.body["error"]
        assert isinstance(error, dict)
        params.append(error["param"])
    assert statuses == [400, 404, 400, 400]
    assert params == ["temperature", "model", "stream", "prompt"]


def test_batch_with_malformed_lines_fails_before_any_line_runs(client: openai.OpenAI) -> None:
    lines = [
        jsonl([completion_line(1)]),
        b"{nonsense\n",
        jsonl([{**completion_line(2), "method": "GET"}]),
        b"\n",
        jsonl([chat_line(3)]),
        jsonl([completion_line(1)]),
        jsonl([{**completion_line(4), "body": []}]),
        b'{"custom_id": "five"}\n',
        b"\xff\n",
    ]
    found = wait_for_end(client, create_batch(client, b"".join(lines)))
    check_valid(found)
    assert found.status == "failed"
    assert (found.output_file_id, found.error_file_id) == (None, None)
    assert found.errors is not None
    assert found.errors.data is not None
    told = [(error.line, error.code, error.param) for error in found.errors.data]
    assert told == [
        (2, "invalid_json_line", None),
        (3, "invalid_method", "method"),
        (5, "invalid_url", "url"),
        (6, "duplicate_custom_id", "custom_id"),
        (7, "invalid_body", "body"),
        (8, "invalid_request", "method"),
        (9, "invalid_json_line", None),
    ]


@pytest.mark.parametrize("data", [b"", b"\n \n"])
def test_batch_of_an_empty_file_fails(client: openai.OpenAI, data: bytes) -> None:
    found = wait_for_end(client, create_batch(client, data))
    assert found.status == "failed"
    assert found.errors is not None
    assert found.errors.data is not None
    assert [error.code for error in found.errors.data] == ["empty_file"]


def test_cancelled_batch_keeps_answers_and_reports_unanswered_lines(client: openai.OpenAI) -> None:
    slow = [completion_line(number, max_tokens=900, ignore_eos=True) for number in range(3, 300)]
    lines = [completion_line(number, max_tokens=1) for number in range(3)] + slow
    batch = create_batch(client, jsonl(lines))
    wait_until(lambda: completed(client, batch) >= 3)
    with pytest.raises(openai.ConflictError) as in_use:
        client.files.delete(batch.input_file_id)
    assert in_use.value.code == "file_in_use"
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    found = wait_for_end(client, batch)
    check_valid(found)
    assert found.status == "cancelled"
    assert found.cancelling_at is not None
    output, errors = content(client, found.output_file_id), content(client, found.error_file_id)
    assert_each_once(lines, output, errors)
    assert found.request_counts is not None
    assert found.request_counts.completed == len(read_jsonl(output)) >= 3
    assert found.request_counts.failed == len(read_jsonl(errors)) > 0
    assert all(one.error is not None and one.error.code == "batch_cancelled" for one in wire_lines(errors))
    with pytest.raises(openai.ConflictError) as over:
        client.batches.cancel(batch.id)
    assert over.value.code == "batch_ended"


def completed(client: openai.OpenAI, batch: Batch) -> int:
    counts = client.batches.retrieve(batch.id).request_counts
    return 0 if counts is None else counts.completed


def test_batches_are_listed_the_newest_first(client: openai.OpenAI) -> None:
    made = [create_batch(client, jsonl([completion_line(1)])) for _ in range(3)]
    for batch in made:
        assert wait_for_end(client, batch).status == "completed"
    first = client.batches.list(limit=2)
    assert [batch.id for batch in first.data] == [made[2].id, made[1].id]
    assert first.has_more
    assert next(iter(client.batches.list(after=made[1].id))).id == made[0].id


async def test_async_openai_client_creates_and_retrieves_batches(batch_server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=batch_server.url, api_key="key", max_retries=0) as client:
        file = await client.files.create(file=io.BytesIO(jsonl([completion_line(1)])), purpose="batch")
        batch = await client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        check_valid(batch)
        check_valid(await client.batches.retrieve(batch.id))
        assert (await client.batches.list(limit=1)).data[0].id == batch.id


GOOD = {"input_file_id": "file-" + 24 * "0", "endpoint": "/v1/completions", "completion_window": "24h"}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({}, "input_file_id"),
        ({"input_file_id": "../../etc/passwd"}, "input_file_id"),
        ({"input_file_id": 3}, "input_file_id"),
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "1d"}, "completion_window"),
        ({"completion_window": "337h"}, "completion_window"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"metadata": {"k": 513 * "x"}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3599}}, "output_expires_after.seconds"),
        ({"output_expires_after": {"anchor": "never", "seconds": 3600}}, "output_expires_after.anchor"),
        ({"zeta": 1}, "zeta"),
    ],
)
def test_invalid_batch_request_gets_400_naming_the_field(
    batch_server: Server, change: dict[str, object], param: str
) -> None:
    answer = batch_server.call("POST", "/v1/batches", GOOD | change)
    assert answer.status == 400
    assert answer.error()["param"] == param


@pytest.mark.parametrize(
    ("path", "param", "message"),
    [
        ("/v1/files?limit=0", "limit", "limit is '0'; allowed: integers from 1 to 10000"),
        ("/v1/files?limit=x", "limit", "limit is 'x'; allowed: integers from 1 to 10000"),
        ("/v1/files?order=up", "order", "order is 'up'; allowed: 'asc', 'desc'"),
        ("/v1/files?after=file-0", "after", "there is no file 'file-0'"),
        ("/v1/files?limit=1&limit=2", "limit", "limit is given twice; allowed: once"),
        ("/v1/files?zeta=1", "zeta", "'zeta' is not a parameter of this URL; allowed: after, limit, order, purpose"),
        ("/v1/batches?limit=101", "limit", "limit is '101'; allowed: integers from 1 to 100"),
        ("/v1/batches?after=batch_0", "after", "there is no batch 'batch_0'"),
    ],
)
def test_invalid_list_query_gets_400_naming_the_parameter(
    batch_server: Server, path: str, param: str, message: str
) -> None:
    answer = batch_server.call("GET", path)
    assert answer.status == 400
    assert (answer.error()["param"], answer.error()["message"]) == (param, message)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/files/..%2F..%2Fetc%2Fpasswd"),
        ("GET", "/v1/files/..%2Fbatches.sqlite/content"),
        ("GET", "/v1/files/nothing/content"),
        ("DELETE", "/v1/files/..%2Fbatches.sqlite"),
        ("GET", "/v1/batches/%00"),
        ("POST", "/v1/batches/..%2F/cancel"),
    ],
)
def test_path_traversal_and_unknown_ids_get_404(batch_server: Server, method: str, path: str) -> None:
    assert batch_server.call(method, path).status == 404


def form(*parts: tuple[str, bytes], end: bytes = b"--x--\r\n") -> bytes:
    return b"".join(b"--x\r\n" + head.encode() + b"\r\n\r\n" + data + b"\r\n" for head, data in parts) + end


FILE = ('Content-Disposition: form-data; name="file"; filename="f"', b"data")
PURPOSE = ('Content-Disposition: form-data; name="purpose"', b"batch")
SECONDS = ('Content-Disposition: form-data; name="expires_after[seconds]"', b"3600")


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        (form(PURPOSE), 400, "file is required"),
        (form(FILE), 400, "purpose is required"),
        (form(FILE, (PURPOSE[0], b"fine-tune")), 400, "purpose is 'fine-tune'; allowed: 'batch'"),
        (form(FILE, FILE, PURPOSE), 400, "file is given twice"),
        (form(FILE, PURPOSE, PURPOSE), 400, "purpose is given twice"),
        (form(FILE, PURPOSE, SECONDS), 400, "are nothing and '3600'; allowed: 'created_at' and an integer from 3600"),
        (form(("X-Long: " + 20_000 * "a", b""), FILE, PURPOSE), 400, "multipart/form-data: Got more than"),
        (form(FILE, PURPOSE, ('Content-Disposition: form-data; name="zeta"', b"")), 400, "'zeta' is not a field"),
        (form(FILE, (PURPOSE[0], 2000 * b"b")), 400, "purpose has more than 1024 bytes"),
        (form((FILE[0] + "\r\nContent-Transfer-Encoding: base64", b"ZGF0YQ=="), PURPOSE), 400, "of a part"),
        (form(FILE, end=b""), 400, "multipart"),
        (b"nonsense", 400, "multipart"),
        (b"", 400, "multipart"),
        (form((FILE[0], (1 << 20) * b"x" + b"x"), PURPOSE), 413, "more than 1048576 bytes"),
    ],
)
def test_invalid_upload_is_refused_and_leaves_no_file(
    batch_server: Server, body: bytes, status: int, told: str
) -> None:
    answer = batch_server.call("POST", "/v1/files", body, {"Content-Type": "multipart/form-data; boundary=x"})
    assert (answer.status, told in str(answer.error()["message"])) == (status, True), answer.body
    wait_until(
        lambda: blobs(batch_server) == listed_file_ids(batch_server)
    )  # a batch of another test may be writing its files


def listed_file_ids(server: Server) -> set[str]:
    files = server.call("GET", "/v1/files").json()["data"]
    assert isinstance(files, list)
    return {file["id"] for file in files}


def blobs(server: Server) -> set[str]:
    directory = Path(str(server.context.settings.data_dir)) / "files"
    return {path.name for path in directory.iterdir()}


def test_upload_accepts_the_file_part_before_the_purpose_part(batch_server: Server) -> None:
    body = form(FILE, PURPOSE)
    answer = batch_server.call("POST", "/v1/files", body, {"Content-Type": "multipart/form-data; boundary=x"})
    assert answer.status == 200
    assert batch_server.call("GET", f"/v1/files/{answer.json()['id']}/content").body == b"data"


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data", "text/plain"])
def test_upload_with_an_invalid_content_type_gets_400(batch_server: Server, kind: str) -> None:
    assert batch_server.call("POST", "/v1/files", b"{}", {"Content-Type": kind}).status == 400


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/files"), ("POST", "/v1/files"), ("POST", "/v1/batches")])
def test_files_and_batches_without_data_dir_get_501_naming_the_flag(
    server: Server, method: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    answer = server.call(method, path)
    assert answer.status == 501
    assert answer.headers["x-should-retry"] == "false"
    assert (answer.error()["type"], answer.error()["code"]) == ("invalid_request_error", "not_configured")
    assert "--data-dir" in str(answer.error()["message"])
    told = [record for record in caplog.records if "--data-dir" in record.getMessage()]
    assert [(record.levelname, record.exc_info) for record in told] == [("WARNING", None)]


def test_a_second_server_on_the_same_directory_is_refused(batch_server: Server, tiny_model: Path) -> None:
    from tok_server.batch.storage.database import StoreError

    with (
        pytest.raises(StoreError, match="in use by another tok"),
        serving(tiny_model, data_dir=batch_server.context.settings.data_dir),
    ):
        pass


def test_batch_and_file_fields_equal_openais() -> None:
    assert set(Batch.model_fields) == set(wire.known_fields(wire.Batch))
    assert set(FileObject.model_fields) == set(wire.known_fields(wire.FileObject))

"""Tests that a batch that is killed at any moment and restarted answers every line once.

`TOK_KILLS=50 pytest tests/test_batch_kill.py` kills as often as that; `TOK_SEED` chooses other moments.
"""

from __future__ import annotations

import os
import random
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import openai
import pytest

from support.batch_process import answer_file, killed_server, told_server
from support.batching import assert_each_once, chat_line, completion_line, jsonl, read_jsonl
from support.patience import PATIENCE, wait_until
from support.tiny_models import make_model

KILLS = int(os.environ.get("TOK_KILLS", "3"))
RANDOM = random.Random(int(os.environ.get("TOK_SEED", "0")))
LONGEST = 1.2  # seconds from a start to the kill
LINES = [
    completion_line(
        number, max_tokens=1 + number % 24, ignore_eos=True, **({"temperature": -1} if number % 10 == 3 else {})
    )
    for number in range(400)
]
BAD = sum(number % 10 == 3 for number in range(400))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("killed") / "tiny")


class Jobs:
    """The batches of a data directory, created one after another and checked once they have ended."""

    def __init__(self) -> None:
        self.ended = 0
        self._id: str | None = None
        self._texts: dict[str, str] | None = None

    def go_on(self, client: openai.OpenAI) -> bool:
        """Check the batch if it has ended, or create one if there is none; return whether a batch is open."""
        if self._id is None:
            file = client.files.create(file=("in.jsonl", jsonl(LINES)), purpose="batch")
            self._id = client.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            ).id
        found = client.batches.retrieve(self._id)
        assert found.status in ("validating", "in_progress", "finalizing", "completed")
        if found.status != "completed":
            return True
        self._check(client, found)
        self._id = None
        return False

    def _check(self, client: openai.OpenAI, found: openai.types.Batch) -> None:
        output, errors = (client.files.content(str(id)).read() for id in (found.output_file_id, found.error_file_id))
        assert_each_once(LINES, output, errors)
        assert found.request_counts is not None
        assert found.request_counts.model_dump() == {"total": len(LINES), "completed": len(LINES) - BAD, "failed": BAD}
        assert len(read_jsonl(errors)) == BAD
        texts = texts_of(output)
        assert self._texts in (None, texts), "an answer depends on how often it was begun"
        self._texts = texts
        self.ended += 1


def texts_of(output: bytes) -> dict[str, str]:
    found = {}
    for line in read_jsonl(output):
        response = line["response"]
        assert isinstance(response, dict)
        found[str(line["custom_id"])] = response["body"]["choices"][0]["text"]
    return found


def test_a_server_killed_at_random_moments_answers_every_line_once(model: Path, tmp_path: Path) -> None:
    jobs = Jobs()
    for _ in range(KILLS):
        with killed_server(model, tmp_path) as (_, port), client_of(port) as client:
            if not jobs.go_on(client):
                jobs.go_on(client)
            time.sleep(RANDOM.uniform(0, LONGEST))
    with killed_server(model, tmp_path) as (_, port), client_of(port) as client:
        wait_until(lambda: not jobs.go_on(client))
        listed = {file.id for file in client.files.list()}
        assert {path.name for path in (tmp_path / "files").iterdir()} == listed
        assert len(listed) == 3 * jobs.ended
        wait_until(lambda: not list((tmp_path / "batches").iterdir()))  # answers of ended batches are deleted
    print(f"{KILLS} kills, {jobs.ended} batches of {len(LINES)} lines")


def client_of(port: int) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="key", max_retries=0)


def answered(partial: Path) -> int:
    """Return the number of committed answers in a partial output."""
    if not partial.exists():
        return 0
    with closing(sqlite3.connect(partial)) as connection:
        (count,) = connection.execute("SELECT count(*) FROM answers").fetchone()
    return int(count)


def test_a_terminated_server_finishes_begun_batch_lines_and_starts_none(model: Path, tmp_path: Path) -> None:
    lines = [completion_line(number, max_tokens=100, ignore_eos=True) for number in range(600)]
    with told_server(model, tmp_path) as (process, port), client_of(port) as client:
        file = client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
        id = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h").id
        wait_until(lambda: done(client, id) > 0)
        process.terminate()
        process.join(PATIENCE)
        assert process.exitcode == 0
    assert 0 < answered(tmp_path / "batches" / f"{id}.sqlite") < len(lines)
    with told_server(model, tmp_path) as (process, port), client_of(port) as client:
        wait_until(lambda: client.batches.retrieve(id).status == "completed")
        output = client.files.content(str(client.batches.retrieve(id).output_file_id)).read()
        assert_each_once(lines, output)
        process.terminate()
        process.join(PATIENCE)
        assert process.exitcode == 0


def done(client: openai.OpenAI, id: str) -> int:
    counts = client.batches.retrieve(id).request_counts
    return counts.completed if counts else 0


def test_tok_batch_killed_at_random_moments_answers_every_line_once(model: Path, tmp_path: Path) -> None:
    lines = [*LINES, *(chat_line(number + len(LINES)) for number in range(20))]
    (file := tmp_path / "in.jsonl").write_bytes(jsonl(lines))
    kills = ended = partly = 0
    going = True
    while kills < KILLS or going:
        # The first process stops itself after its first answer, so that the kill comes while lines are computed.
        process, committed = answer_file(model, file, output := tmp_path / f"out {ended}.jsonl", stops=not kills)
        assert committed.poll(PATIENCE), "nothing was answered"
        process.join(RANDOM.uniform(0, LONGEST) * (kills > 0) if kills < KILLS else PATIENCE)
        committed.close()
        if process.exitcode is None:
            process.kill()
            process.join(PATIENCE)
            kills += 1
            partly += 0 < answered(Path(f"{output}.partial")) < len(lines)
        else:
            assert process.exitcode == 0
        going = not output.exists() or Path(f"{output}.partial").exists()
        if not going:  # the output may be complete at a kill, too
            assert_each_once(lines, output.read_bytes())
            Path(f"{output}.lock").unlink(missing_ok=True)
            ended += 1
    assert partly, "no kill found some lines answered, and others not"
    assert {path.name for path in tmp_path.iterdir()} == {
        "in.jsonl",
        *(f"out {number}.jsonl" for number in range(ended)),
    }

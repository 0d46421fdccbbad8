"""`tok batch`: answer files without a server, resume, retry failed lines, refuse bad input."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from support.batch_memory import MIB, memory_of, same_lines
from support.batching import NAME, assert_each_once, chat_line, completion_line, custom_ids, jsonl, read_jsonl
from support.tiny_models import make_model
from tok_client.types import BatchError
from tok_core import AsyncEngine, EngineConfig, InvalidField
from tok_server.batch.execution.line_runner import LineSource
from tok_server.batch.offline.offline import InvalidInput, OfflineBatch, successful_answers
from tok_server.batch.offline.progress import duration
from tok_server.batch.storage import validation
from tok_server.batch.storage.answers import Answers, LineAnswer, Totals
from tok_server.batch.storage.database import StoreError
from tok_server.batch.storage.lines import Stopped, read_lines
from tok_server.batch.storage.validation import MAX_ERRORS, validate
from tok_server.cli import main
from tok_server.openai.endpoints import ENDPOINTS

MIXED = [completion_line(0), chat_line(1), completion_line(2, top_p=7), chat_line(3, n=2), completion_line(4)]


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[AsyncEngine]:
    config = EngineConfig(model=str(tiny_model), device="cpu", kv_cache_tokens=16_384, max_running=16)
    found = AsyncEngine(config, in_process=True)
    asyncio.run(found.start())
    yield found
    asyncio.run(found.close())


async def answer(engine: AsyncEngine, file: Path, output: Path, *, retry_failed: bool = False) -> Totals:
    with OfflineBatch(file, output, NAME, retry_failed=retry_failed) as work:
        await work.check()
        return await work.answer(engine)


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


async def test_lines_honour_or_refuse_the_fields_of_other_servers(engine: AsyncEngine, tmp_path: Path) -> None:
    lines = [
        completion_line(0, allowed_token_ids=[40, 41], bad_words=["J"], return_token_ids=True, ignore_eos=True),
        chat_line(1, truncate_prompt_tokens=2, return_token_ids=True),
        chat_line(2, regex="[a-z]+"),
    ]
    (tmp_path / "in").write_bytes(jsonl(lines))
    await answer(engine, tmp_path / "in", tmp_path / "out")
    found: list[Any] = [line["response"] for line in read_jsonl((tmp_path / "out").read_bytes())]
    assert [one["status_code"] for one in found] == [200, 200, 400]
    completion, chat, refused = (one["body"] for one in found)
    assert set(completion["choices"][0]["token_ids"]) == {40}  # 41 is the bad word
    assert len(chat["prompt_token_ids"]) == 2
    assert refused["error"]["param"] == "regex"


async def test_lines_for_scores_are_answered(engine: AsyncEngine, tmp_path: Path) -> None:
    bodies: list[dict[str, object]] = [
        {"text_1": "one fox", "text_2": ["two dogs", "one fox"]},
        {"text_1": [], "text_2": "a"},
    ]
    lines: list[dict[str, object]] = [
        {"custom_id": f"line-{index}", "method": "POST", "url": url, "body": body}
        for index, (url, body) in enumerate(product(("/score", "/v1/score"), bodies))
    ]
    (tmp_path / "in").write_bytes(jsonl(lines))
    totals = await answer(engine, tmp_path / "in", tmp_path / "out")
    found: list[Any] = [line["response"] for line in read_jsonl((tmp_path / "out").read_bytes())]
    assert [one["status_code"] for one in found] == [200, 400] * 2
    for one in (found[0]["body"], found[2]["body"]):
        assert one["data"][0]["score"] < one["data"][1]["score"] == pytest.approx(1)
    assert totals.input_tokens == sum(found[index]["body"]["usage"]["prompt_tokens"] for index in (0, 2))
    assert found[1]["body"]["error"]["param"] == "text_1"


async def test_output_has_an_answer_to_every_line_in_input_order(engine: AsyncEngine, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(jsonl(MIXED))
    totals = await answer(engine, tmp_path / "in", tmp_path / "out")
    assert (totals.completed, totals.failed) == (4, 1)
    found = read_jsonl((tmp_path / "out").read_bytes())
    assert custom_ids(found) == custom_ids(MIXED)
    responses = [line["response"] for line in found]
    assert [one["status_code"] for one in responses if isinstance(one, dict)] == [200, 200, 400, 200, 200]
    assert totals.output_tokens == sum(
        one["body"]["usage"]["completion_tokens"]
        for one in responses
        if isinstance(one, dict) and "usage" in one["body"]
    )
    assert names(tmp_path) == {"in", "out"}


async def test_interrupted_run_resumes_without_recomputing_answers(engine: AsyncEngine, tmp_path: Path) -> None:
    lines = [completion_line(number, max_tokens=60, ignore_eos=True) for number in range(60)]
    (tmp_path / "in").write_bytes(jsonl(lines))
    with OfflineBatch(tmp_path / "in", tmp_path / "out", NAME) as work:
        await work.check()
        running = asyncio.create_task(work.answer(engine))
        while not work.totals.completed:
            await asyncio.sleep(0.005)
            assert not running.done()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert names(tmp_path) == {"in", "out.partial"}
    copy = shutil.copy(tmp_path / "out.partial", tmp_path / "copy")
    digest = validate(tmp_path / "in", {"/v1/completions"}, MIB).digest
    with Answers(Path(copy), f"{digest} by {NAME}") as answers:
        before = {one.line: one.text for one in answers.in_order()}
    assert 0 < len(before) < len(lines)
    (tmp_path / "copy").unlink()
    assert (await answer(engine, tmp_path / "in", tmp_path / "out")).completed == len(lines)
    data = (tmp_path / "out").read_bytes()
    assert_each_once(lines, data)
    texts = data.splitlines()
    assert all(texts[line] == text for line, text in before.items())
    assert names(tmp_path) == {"in", "out"}


async def test_retry_failed_recomputes_only_failed_lines(engine: AsyncEngine, tmp_path: Path) -> None:
    lines = [completion_line(0), completion_line(1, model="later"), completion_line(2)]
    (tmp_path / "in").write_bytes(jsonl(lines))
    assert (await answer(engine, tmp_path / "in", tmp_path / "out")).failed == 1
    first = (tmp_path / "out").read_bytes().splitlines()
    lines[1] = completion_line(1)
    (tmp_path / "in").write_bytes(jsonl(lines))
    totals = await answer(engine, tmp_path / "in", tmp_path / "out", retry_failed=True)
    assert (totals.completed, totals.failed) == (3, 0)
    second = (tmp_path / "out").read_bytes().splitlines()
    assert [one == other for one, other in zip(first, second, strict=True)] == [True, False, True]
    assert names(tmp_path) == {"in", "out"}


@pytest.mark.parametrize("lines", [[3, 1], [0], [0, 1, 2]])
async def test_retry_failed_refuses_an_output_of_another_input(
    engine: AsyncEngine, tmp_path: Path, lines: list[int]
) -> None:
    (tmp_path / "in").write_bytes(jsonl(MIXED[:2]))
    await answer(engine, tmp_path / "in", tmp_path / "out")
    before = (tmp_path / "out").read_bytes()
    (tmp_path / "in").write_bytes(jsonl(MIXED[line] for line in lines))
    with pytest.raises(StoreError, match="out"):
        await answer(engine, tmp_path / "in", tmp_path / "out", retry_failed=True)
    with pytest.raises(InvalidField, match="output"):
        await answer(engine, tmp_path / "in", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == before


async def test_output_for_which_the_disk_has_no_space_is_written_by_the_next_run(
    engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").write_bytes(jsonl(MIXED))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(StoreError, match=r"out: cannot be written: No space left on device; run the same command"):
            await answer(engine, tmp_path / "in", tmp_path / "out")
    assert names(tmp_path) == {"in", "out.partial"}
    before = engine.stats()["output_tokens"]
    await answer(engine, tmp_path / "in", tmp_path / "out")
    assert engine.stats()["output_tokens"] == before
    assert names(tmp_path) == {"in", "out"}


def full_disk(_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_partial_answers_to_another_input_are_refused(engine: AsyncEngine, tmp_path: Path) -> None:
    Answers(tmp_path / "out.partial", "another").close()
    (tmp_path / "in").write_bytes(jsonl(MIXED))
    with pytest.raises(StoreError, match=r"out\.partial: holds the answers of another batch .*; delete it"):
        await answer(engine, tmp_path / "in", tmp_path / "out")


async def test_answers_stored_before_a_crash_are_kept_unchanged(engine: AsyncEngine, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(jsonl(MIXED))
    with OfflineBatch(tmp_path / "in", tmp_path / "out", NAME) as work:
        await work.check()
        digest = work._digest
        await work.answer(engine)
    before = (tmp_path / "out").read_bytes()
    with Answers(tmp_path / "out.partial", f"{digest} by {NAME}") as answers:
        for group in successful_answers(tmp_path / "out", LineSource(tmp_path / "in", len(MIXED))):
            answers.add(group)
    await answer(engine, tmp_path / "in", tmp_path / "out")
    after = (tmp_path / "out").read_bytes()
    same = [one == other for one, other in zip(before.splitlines(), after.splitlines(), strict=True)]
    assert same == [True, True, False, True, True]  # no answer to the failed line was stored here
    assert names(tmp_path) == {"in", "out"}


async def test_retry_failed_works_after_a_crash_with_all_answers_stored(engine: AsyncEngine, tmp_path: Path) -> None:
    lines = [completion_line(0), completion_line(1, model="later")]
    (tmp_path / "in").write_bytes(jsonl(lines))
    with OfflineBatch(tmp_path / "in", tmp_path / "out", NAME) as work:
        await work.check()
        await work.answer(engine)
        digest = work._digest
    texts = (tmp_path / "out").read_bytes().splitlines()
    with Answers(tmp_path / "out.partial", f"{digest} by {NAME}") as answers:
        answers.add(LineAnswer(line, line == 1, 0, 0, 0, 0, text) for line, text in enumerate(texts))
    await answer(engine, tmp_path / "in", tmp_path / "out", retry_failed=True)
    again = (tmp_path / "out").read_bytes().splitlines()
    assert [one == other for one, other in zip(texts, again, strict=True)] == [True, False]
    assert names(tmp_path) == {"in", "out"}


def test_output_in_use_by_another_process_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(jsonl(MIXED))
    with (
        OfflineBatch(tmp_path / "in", tmp_path / "out", NAME),
        pytest.raises(StoreError, match="in use by another tok"),
    ):
        OfflineBatch(tmp_path / "in", tmp_path / "out", NAME).__enter__()
    assert names(tmp_path) == {"in"}


@pytest.mark.parametrize(
    ("file", "output", "retry", "field"),
    [
        ("none", "out", False, "file"),
        ("in", "none/out", False, "output"),
        ("in", "in", False, "output"),
        ("in", "out", True, "retry_failed"),
    ],
)
def test_invalid_input_or_output_path_is_refused_naming_the_field(
    tmp_path: Path, file: str, output: str, retry: bool, field: str
) -> None:
    (tmp_path / "in").write_bytes(jsonl(MIXED))
    with pytest.raises(InvalidField) as refused:
        OfflineBatch(tmp_path / file, tmp_path / output, NAME, retry_failed=retry).__enter__()
    assert refused.value.field == field
    assert names(tmp_path) == {"in"}


@pytest.mark.parametrize("output", ["-", ""])
def test_output_that_is_no_file_is_refused(tmp_path: Path, output: str) -> None:
    with pytest.raises(InvalidField, match="allowed: the name of a file"):
        OfflineBatch(tmp_path / "in", Path(output), NAME)


async def test_malformed_lines_are_reported_before_anything_runs(tmp_path: Path) -> None:
    bad = b"nonsense\n" * 150
    (tmp_path / "in").write_bytes(jsonl(MIXED) + bad)
    with OfflineBatch(tmp_path / "in", tmp_path / "out", NAME) as work, pytest.raises(InvalidInput) as refused:
        await work.check()
    assert refused.value.truncated
    assert [error.line for error in refused.value.errors] == list(range(6, 6 + MAX_ERRORS))
    assert all(isinstance(error, BatchError) for error in refused.value.errors)


def test_validation_of_a_batch_file_can_be_stopped(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(jsonl(MIXED))
    with pytest.raises(Stopped):
        validate(tmp_path / "in", {"/v1/completions"}, MIB, lambda: True)


def test_validation_of_blank_lines_can_be_stopped(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"\n" * 20_000)
    looks = iter([False, True])
    with pytest.raises(Stopped):
        validate(tmp_path / "in", {"/v1/completions"}, MIB, lambda: next(looks))


def test_file_with_too_many_lines_is_refused_at_the_first_excess_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "MAX_LINES", 4)
    (tmp_path / "in").write_bytes(jsonl(MIXED))
    found = validate(tmp_path / "in", ENDPOINTS.keys(), MIB)
    assert [(error.line, error.code) for error in found.errors] == [(5, "too_many_lines")]
    (tmp_path / "in").write_bytes(jsonl(MIXED[:4]))
    assert not validate(tmp_path / "in", ENDPOINTS.keys(), MIB).errors


def test_line_numbers_count_blank_lines_but_rows_do_not(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(
        b"\n one \r\n\n" + b"x" * 10 + b"\n" + b"x" * 11 + b"\n" + b"y" * (3 << 20) + b"\nlast"
    )
    found = [(line.row, line.number, line.data) for line in read_lines(tmp_path / "in", 10)]
    assert found == [(0, 2, b"one"), (1, 4, b"x" * 10), (2, 5, None), (3, 6, None), (4, 7, b"last")]


def test_duplicate_custom_ids_are_found_anywhere_in_the_file(tmp_path: Path) -> None:
    ids = [f"{number}" for number in range(3000)]
    ids[2990] = "7"
    ids[2995] = "é\u0000"
    ids[2999] = "é\u0000"
    (tmp_path / "in").write_bytes(jsonl({**completion_line(0), "custom_id": id} for id in ids))
    found = validate(tmp_path / "in", {"/v1/completions"}, MIB)
    assert found.lines == 3000
    assert [(error.line, error.code) for error in found.errors] == [
        (2991, "duplicate_custom_id"),
        (3000, "duplicate_custom_id"),
    ]


def test_tok_batch_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """`python -m support.batch_memory` makes the same measurement with any number of lines."""
    model = make_model("llama", tmp_path / "tiny", layers=1)
    most = asyncio.run(memory_of(tmp_path, model, 5000, padding=5000))
    assert (tmp_path / "in.jsonl").stat().st_size > 24 * MIB
    assert max(most[1:]) - most[1] < 8 * MIB, most  # the first tenth may include memory from before the run
    pairs = list(same_lines(tmp_path))
    assert len(pairs) == 5000
    assert all(asked == answered for asked, answered in pairs)


@pytest.mark.parametrize(("seconds", "told"), [(0.4, "0:00:00"), (59.6, "0:01:00"), (90061, "25:01:01")])
def test_duration_is_formatted_in_hours_minutes_and_seconds(seconds: float, told: str) -> None:
    assert duration(seconds) == told


def test_batch_command_answers_a_file_and_prints_a_summary(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = tiny_model.name
    lines = [completion_line(number, model=tiny) for number in range(3)] + [completion_line(3, model="another")]
    (tmp_path / "in").write_bytes(jsonl(lines))
    words = ["batch", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--model", str(tiny_model)]
    words += ["--device", "cpu", "--kv-cache-tokens", "4096"]
    assert main(words) == 1
    summary = capsys.readouterr().err
    assert re.search(r"4 lines written to .*out: 3 answered, 1 failed; [\d,]+ tokens of prompts", summary)
    assert_each_once(lines, (tmp_path / "out").read_bytes())
    assert main(words) == 2
    assert re.match(r"tok batch: error: --output is '.*out'; allowed: ", capsys.readouterr().err)


@pytest.mark.parametrize("blank", [b"", b"\n\n"])
def test_batch_command_reports_a_file_without_requests(
    blank: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").write_bytes(blank)
    assert main(["batch", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--model", "/no/such/model"]) == 2
    assert capsys.readouterr().err == f"tok batch: error: {tmp_path / 'in'}: The file has no requests.\n"


def test_batch_command_reports_bad_lines_without_loading_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").write_bytes(b"nonsense\n" * 12)
    words = ["batch", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--model", "/no/such/model"]
    assert main(words) == 2
    told = capsys.readouterr().err.splitlines()
    assert told[0].endswith("in: 12 bad lines; nothing was run")
    assert told[1].startswith("  line 1: The line is not a valid request: ")
    assert told[-1] == "  …"
    assert names(tmp_path) == {"in"}

"""Tests of `map`'s output file, from which a later run resumes however the earlier one ended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest
import pytest_asyncio

from support.echo_server import EchoServer, endless, prompts
from support.patience import until
from tok_client import Completion, read_answers


@pytest_asyncio.fixture
async def echo() -> AsyncIterator[EchoServer]:
    echo = EchoServer()
    async with echo.server:
        yield echo


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


async def run_into(echo: EchoServer, path: Path, inputs: Iterable[str], **params: object) -> list[int]:
    async with echo.client() as client:
        run = client.completions.map(inputs, **{"model": "m", "output": path, "on_error": "return", **params})  # type: ignore[arg-type]
        return [one.index async for one in run]


async def test_map_resumes_from_the_output_of_an_earlier_run(echo: EchoServer, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    echo.fault = lambda prompt, tries: "400" if prompt in ("prompt 2", "prompt 7") else None
    assert await run_into(echo, path, prompts(10)) == list(range(10))
    assert sorted(line["index"] for line in lines(path)) == [0, 1, 3, 4, 5, 6, 8, 9]  # type: ignore[type-var]
    echo.fault = lambda prompt, tries: None
    echo.asked.clear()
    assert await run_into(echo, path, prompts(12)) == [2, 7, 10, 11]
    assert echo.asked == Counter(["prompt 2", "prompt 7", "prompt 10", "prompt 11"])
    saved = {one.index: one.answer.choices[0].text for one in read_answers(path, Completion)}
    assert saved == {index: prompt.upper() for index, prompt in enumerate(prompts(12))}
    assert await run_into(echo, path, prompts(12)) == []


@pytest.mark.parametrize("cut", [1, 20, 60])
async def test_map_drops_a_torn_last_line_and_resends_its_prompt(echo: EchoServer, tmp_path: Path, cut: int) -> None:
    path = tmp_path / "out.jsonl"
    await run_into(echo, path, prompts(5), concurrency=1)
    os.truncate(path, path.stat().st_size - cut)
    assert len(list(read_answers(path, Completion))) == 4
    assert await run_into(echo, path, prompts(5)) == [4]
    assert sorted(line["index"] for line in lines(path)) == list(range(5))  # type: ignore[type-var]


async def test_map_refuses_to_resume_other_prompts_or_parameters(echo: EchoServer, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    await run_into(echo, path, prompts(5))
    before = path.read_bytes()
    with pytest.raises(ValueError, match="answer to another request for prompt 1;"):
        await run_into(echo, path, ["prompt 0", "other"])
    with pytest.raises(ValueError, match="answer to another request for prompt 0;"):
        await run_into(echo, path, prompts(5), temperature=0.5)
    with pytest.raises(ValueError, match="has no keys"):
        await run_into(echo, path, prompts(5), key=str)
    assert path.read_bytes() == before
    path.write_text('{"index": 0}\n')
    with pytest.raises(ValueError, match="is not an output file of map: line 1"):
        await run_into(echo, path, prompts(5))


async def test_map_with_keys_resumes_prompts_in_any_order(echo: EchoServer, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    await run_into(echo, path, prompts(5), key=str.upper)
    assert {line["key"] for line in lines(path)} == {prompt.upper() for prompt in prompts(5)}
    assert await run_into(echo, path, ["new", *reversed(prompts(6))], key=str.upper) == [0, 1]
    with pytest.raises(ValueError, match="key 'A' belongs to several prompts, including prompt 1"):
        await run_into(echo, path, ["a", "A"], key=str.upper)


async def test_a_map_output_is_locked_by_one_run_at_a_time(echo: EchoServer, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    async with echo.client() as client:
        async with client.completions.map(endless(), model="m", concurrency=2, output=path) as run:
            await anext(run)
            with pytest.raises(BlockingIOError, match="another run is writing this output"):
                await run_into(echo, path, prompts(5))
        assert len(lines(path)) >= 1


async def test_an_unwritable_map_output_raises(echo: EchoServer, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await run_into(echo, tmp_path / "none" / "out.jsonl", prompts(5))


FULL = """
import resource, sys
from tok_client import Client
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
with Client(sys.argv[1]) as client:
    try:
        for _ in client.completions.map([f"prompt {i}" for i in range(50)], model="m", output=sys.argv[2]):
            pass
    except OSError as error:
        print(error.strerror)
"""


async def test_a_full_disk_tears_only_the_last_line_of_a_map_output(echo: EchoServer, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    command = (sys.executable, "-W", "error", "-c", FULL, echo.url, str(path))
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert (await child.communicate())[0] == b"File too large\n"
    assert path.stat().st_size == 1000
    kept = len(list(read_answers(path, Completion)))
    assert 1 <= kept < 50
    assert len(await run_into(echo, path, prompts(50))) == 50 - kept
    assert sorted(line["index"] for line in lines(path)) == list(range(50))  # type: ignore[type-var]


KILLED = """
import sys
from tok_client import Client
with Client(sys.argv[1]) as client:
    for _ in client.completions.map((f"prompt {i}" for i in range(200)), model="m", concurrency=8, output=sys.argv[2]):
        pass
"""


async def test_a_killed_map_run_repeats_only_prompts_in_flight(echo: EchoServer, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    await killed_after(40, echo, path)
    await killed_after(120, echo, path)
    lost = await run_into(echo, path, prompts(200))
    assert sorted(line["index"] for line in lines(path)) == list(range(200))  # type: ignore[type-var]
    twice = [prompt for prompt, times in echo.answered.items() if times > 1]
    assert len(twice) <= 2 * 8  # prompts whose answers were in flight at a kill
    assert len(lost) <= 200 - 120 + 8


async def killed_after(answers: int, echo: EchoServer, path: Path) -> None:
    echo.gate = lambda prompt: echo.answered.total() < answers
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", KILLED, echo.url, str(path))
    await until(lambda: echo.answered.total() >= answers and len(lines(path)) >= answers - 8)
    child.send_signal(signal.SIGKILL)
    assert await child.wait() == -signal.SIGKILL
    echo.gate = lambda prompt: True
    await until(lambda: echo.open == 0)

"""The output file of `map`: a later run goes on with it, whatever became of the earlier one."""

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

from support.mill import Mill, endless, prompts
from support.patience import until
from tok_client import Completion, read_answers


@pytest_asyncio.fixture
async def mill() -> AsyncIterator[Mill]:
    mill = Mill()
    async with mill.server:
        yield mill


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


async def run_into(mill: Mill, path: Path, asked: Iterable[str], **given: object) -> list[int]:
    async with mill.client() as client:
        run = client.completions.map(asked, **{"model": "m", "output": path, "on_error": "return", **given})  # type: ignore[arg-type]
        return [one.index async for one in run]


async def test_a_run_goes_on_where_another_one_ended(mill: Mill, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    mill.fault = lambda prompt, tries: "400" if prompt in ("prompt 2", "prompt 7") else None
    assert await run_into(mill, path, prompts(10)) == list(range(10))
    assert sorted(line["index"] for line in lines(path)) == [0, 1, 3, 4, 5, 6, 8, 9]  # type: ignore[type-var]
    mill.fault = lambda prompt, tries: None
    mill.asked.clear()
    assert await run_into(mill, path, prompts(12)) == [2, 7, 10, 11]
    assert mill.asked == Counter(["prompt 2", "prompt 7", "prompt 10", "prompt 11"])
    saved = {one.index: one.answer.choices[0].text for one in read_answers(path, Completion)}
    assert saved == {index: prompt.upper() for index, prompt in enumerate(prompts(12))}
    assert await run_into(mill, path, prompts(12)) == []


@pytest.mark.parametrize("cut", [1, 20, 60])
async def test_a_torn_last_line_is_dropped_and_its_prompt_asked_again(mill: Mill, tmp_path: Path, cut: int) -> None:
    path = tmp_path / "out.jsonl"
    await run_into(mill, path, prompts(5), concurrency=1)
    os.truncate(path, path.stat().st_size - cut)
    assert len(list(read_answers(path, Completion))) == 4
    assert await run_into(mill, path, prompts(5)) == [4]
    assert sorted(line["index"] for line in lines(path)) == list(range(5))  # type: ignore[type-var]


async def test_an_output_of_other_prompts_or_parameters_is_not_gone_on_with(mill: Mill, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    await run_into(mill, path, prompts(5))
    before = path.read_bytes()
    with pytest.raises(ValueError, match="answer to another request for prompt 1;"):
        await run_into(mill, path, ["prompt 0", "other"])
    with pytest.raises(ValueError, match="answer to another request for prompt 0;"):
        await run_into(mill, path, prompts(5), temperature=0.5)
    with pytest.raises(ValueError, match="has no keys"):
        await run_into(mill, path, prompts(5), key=str)
    assert path.read_bytes() == before
    path.write_text('{"index": 0}\n')
    with pytest.raises(ValueError, match="is no output of map: line 1"):
        await run_into(mill, path, prompts(5))


async def test_with_keys_the_order_may_change(mill: Mill, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    await run_into(mill, path, prompts(5), key=str.upper)
    assert {line["key"] for line in lines(path)} == {prompt.upper() for prompt in prompts(5)}
    assert await run_into(mill, path, ["new", *reversed(prompts(6))], key=str.upper) == [0, 1]
    with pytest.raises(ValueError, match="key 'A' belongs to several prompts, of which 1 is one"):
        await run_into(mill, path, ["a", "A"], key=str.upper)


async def test_an_output_is_written_by_one_run_at_a_time(mill: Mill, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    async with mill.client() as client:
        async with client.completions.map(endless(), model="m", concurrency=2, output=path) as run:
            await anext(run)
            with pytest.raises(BlockingIOError, match="another run writes this output"):
                await run_into(mill, path, prompts(5))
        assert len(lines(path)) >= 1


async def test_an_output_that_cannot_be_written_is_told(mill: Mill, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await run_into(mill, tmp_path / "none" / "out.jsonl", prompts(5))


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


async def test_of_a_disk_that_is_full_every_line_but_the_last_is_whole(mill: Mill, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    command = (sys.executable, "-W", "error", "-c", FULL, mill.url, str(path))
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert (await child.communicate())[0] == b"File too large\n"
    assert path.stat().st_size == 1000
    kept = len(list(read_answers(path, Completion)))
    assert 1 <= kept < 50
    assert len(await run_into(mill, path, prompts(50))) == 50 - kept
    assert sorted(line["index"] for line in lines(path)) == list(range(50))  # type: ignore[type-var]


KILLED = """
import sys
from tok_client import Client
with Client(sys.argv[1]) as client:
    for _ in client.completions.map((f"prompt {i}" for i in range(200)), model="m", concurrency=8, output=sys.argv[2]):
        pass
"""


async def test_of_a_killed_run_nothing_is_lost_and_nothing_asked_twice(mill: Mill, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    await killed_after(40, mill, path)
    await killed_after(120, mill, path)
    lost = await run_into(mill, path, prompts(200))
    assert sorted(line["index"] for line in lines(path)) == list(range(200))  # type: ignore[type-var]
    twice = [prompt for prompt, times in mill.answered.items() if times > 1]
    assert len(twice) <= 2 * 8  # those whose answers were on their way when it was killed
    assert len(lost) <= 200 - 120 + 8


async def killed_after(answers: int, mill: Mill, path: Path) -> None:
    mill.gate = lambda prompt: mill.answered.total() < answers
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", KILLED, mill.url, str(path))
    await until(lambda: mill.answered.total() >= answers and len(lines(path)) >= answers - 8)
    child.send_signal(signal.SIGKILL)
    assert await child.wait() == -signal.SIGKILL
    mill.gate = lambda prompt: True
    await until(lambda: mill.open == 0)

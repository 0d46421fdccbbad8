"""Tests of `map`: its window of open requests, result order, errors, memory and progress."""

from __future__ import annotations

import asyncio
import io
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from support.echo_server import EchoServer, endless, prompts
from support.patience import until
from tok_client import (
    BadRequestError,
    ChatCompletion,
    Client,
    Completion,
    EmbeddingList,
    InternalServerError,
    MapResult,
    TokError,
)
from tok_client.mapping.progress import MappingProgress
from tok_client.requests.params import Conversation


@pytest_asyncio.fixture
async def echo() -> AsyncIterator[EchoServer]:
    echo = EchoServer()
    async with echo.server:
        yield echo


def texts(results: Iterable[MapResult[object, Completion]]) -> list[str]:
    return [one.result().choices[0].text for one in results]


def generator_of(items: Iterable[str]) -> Iterator[str]:
    yield from items


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("kind", [list, generator_of])
async def test_map_answers_every_prompt_once(
    echo: EchoServer, ordered: bool, kind: Callable[[Iterable[str]], Iterable[str]]
) -> None:
    asked = prompts(100)
    echo.gate = lambda prompt: echo.most_open == 7
    async with echo.client() as client:
        run = client.completions.map(kind(asked), model="m", max_tokens=5, concurrency=7, ordered=ordered)
        found = [one async for one in run]
    assert sorted(one.index for one in found) == list(range(100))
    assert all(one.prompt == asked[one.index] for one in found)
    assert sorted(texts(found)) == sorted(prompt.upper() for prompt in asked)
    if ordered:
        assert [one.index for one in found] == list(range(100))
    assert echo.asked == Counter(asked)
    assert echo.most_open == 7


def test_blocking_map_answers_all_prompts_within_its_concurrency() -> None:
    async def serve() -> tuple[list[str], int, set[str]]:
        echo = EchoServer()
        threads: set[str] = set()

        def run() -> list[str]:
            def source() -> Iterator[str]:
                for prompt in prompts(50):
                    threads.add(threading.current_thread().name)
                    yield prompt

            with Client(echo.url) as client, client.completions.map(source(), model="m", concurrency=4) as found:
                return texts(found)

        async with echo.server:
            return await asyncio.to_thread(run), echo.most_open, threads

    found, most_open, threads = asyncio.run(serve())
    assert found == [prompt.upper() for prompt in prompts(50)]
    assert most_open <= 4
    assert "tok-client" not in threads  # so that a blocking generator holds up no connection


async def test_map_takes_conversations_and_embedding_inputs(echo: EchoServer) -> None:
    async with echo.client() as client:
        talks: list[Conversation] = ["hello", [{"role": "system", "content": "s"}, {"role": "user", "content": "bye"}]]
        said = [one.result() async for one in client.chat.completions.map(talks, model="m")]
        vectors = [one.result() async for one in client.embeddings.map(["a", "abc"], model="m")]
    assert [answer.choices[0].message.content for answer in said] == ["HELLO", "BYE"]
    assert all(isinstance(answer, ChatCompletion) for answer in said)
    assert [answer.data[0].vector() for answer in vectors] == [[1.0], [3.0]]
    assert all(isinstance(answer, EmbeddingList) for answer in vectors)


async def test_map_takes_no_more_prompts_than_its_window_holds(echo: EchoServer) -> None:
    taken = 0

    async def source() -> AsyncIterator[str]:
        nonlocal taken
        async for prompt in endless():
            taken += 1
            yield prompt

    echo.gate = lambda prompt: prompt != "prompt 3"  # the results of all later prompts must wait for prompt 3
    async with echo.client() as client:
        async with client.completions.map(source(), model="m", concurrency=5) as run:
            assert texts([await anext(run) for _ in range(3)]) == ["PROMPT 0", "PROMPT 1", "PROMPT 2"]
            await until(lambda: echo.answered.total() == 3 + 4 * 5 - 1)
            await asyncio.sleep(0.05)
            assert echo.answered.total() == 3 + 4 * 5 - 1
            assert taken == 3 + 4 * 5 + 1
        await until(lambda: echo.open == 0)  # closing the run disconnects


async def test_unordered_map_is_not_held_up_by_a_slow_prompt(echo: EchoServer) -> None:
    echo.gate = lambda prompt: prompt != "prompt 0" or echo.answered.total() == 99
    async with echo.client() as client:
        run = client.completions.map(prompts(100), model="m", concurrency=3, ordered=False)
        found = [one.index async for one in run]
    assert found[-1] == 0
    assert sorted(found) == list(range(100))


@pytest.mark.parametrize("way", ["break", "close", "error"])
async def test_leaving_a_map_run_disconnects_its_open_requests(echo: EchoServer, way: str) -> None:
    echo.gate = lambda prompt: prompt == "prompt 0"
    echo.fault = lambda prompt, tries: "400" if way == "error" else None
    async with echo.client() as client:
        run = client.completions.map(endless(), model="m", concurrency=5)
        if way == "error":
            with pytest.raises(BadRequestError):
                await anext(run)
        else:
            await anext(run)
        if way == "close":
            await run.close()
            assert [one async for one in run] == []
        del run
        await until(lambda: echo.open == 0)


FAULTS = ["drop", "half", "500", "503 0", "429 0", "502"]


@pytest.mark.parametrize("ordered", [True, False])
async def test_map_answers_every_prompt_once_despite_server_faults(echo: EchoServer, ordered: bool) -> None:
    echo.fault = lambda prompt, tries: FAULTS[(int(prompt.split()[1]) + tries) % len(FAULTS)] if tries <= 3 else None
    async with echo.client() as client:
        run = client.completions.map(prompts(60), model="m", concurrency=16, ordered=ordered)
        found = [one async for one in run]
    assert sorted(texts(found)) == sorted(prompt.upper() for prompt in prompts(60))
    assert echo.answered == Counter(prompts(60))
    assert set(echo.asked.values()) == {4}


async def test_map_errors_are_raised_in_order_or_returned(echo: EchoServer) -> None:
    echo.fault = lambda prompt, tries: {"prompt 3": "400", "prompt 5": "garbage"}.get(prompt)
    asked = [*prompts(8), "lone \ud800"]
    async with echo.client() as client:
        found = [one async for one in client.completions.map(asked, model="m", on_error="return")]
        assert [one.index for one in found if one.error] == [3, 5, 8]
        kinds = [type(one.error).__name__ for one in found if one.error]
        assert kinds == ["BadRequestError", "APIResponseError", "ValueError"]
        with pytest.raises(BadRequestError):
            found[3].result()
        run = client.completions.map(asked, model="m")
        assert [(await anext(run)).index for _ in range(3)] == [0, 1, 2]
        with pytest.raises(BadRequestError):
            await anext(run)
        assert [one async for one in run] == []


async def test_map_gives_up_after_max_retries(echo: EchoServer) -> None:
    echo.fault = lambda prompt, tries: "500"
    async with echo.client() as client:
        with pytest.raises(InternalServerError):
            await anext(client.completions.map(["a"], model="m", max_retries=2))
    assert echo.asked["a"] == 3


async def test_map_raises_the_error_of_its_prompt_iterable(echo: EchoServer) -> None:
    def source() -> Iterator[str]:
        yield "a"
        raise LookupError("no more")

    async with echo.client() as client:
        with pytest.raises(LookupError, match="no more"):
            [one async for one in client.completions.map(source(), model="m")]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"concurrency": 0}, "concurrency is 0"),
        ({"concurrency": 2.5}, "concurrency is 2.5"),
        ({"max_retries": None}, "max_retries is None"),
        ({"sync_seconds": "5"}, "sync_seconds is '5'"),
        ({"max_retries": -1}, "max_retries is -1"),
        ({"on_error": "ignore"}, "on_error is 'ignore'"),
        ({"sync_seconds": 0.0}, "sync_seconds is 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"timeout": 0}, "timeout is 0"),
    ],
)
def test_map_refuses_invalid_arguments_by_name(given: dict[str, object], message: str) -> None:
    with Client() as client:
        with pytest.raises(ValueError, match=message):
            client.completions.map(["a"], model="m", **given)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="prompts is one text"):
            client.completions.map("a", model="m")
        with pytest.raises(TypeError, match="colour"):
            client.completions.map(["a"], model="m", colour="red")  # type: ignore[call-arg]


async def test_map_memory_does_not_grow_with_the_number_of_prompts(echo: EchoServer, tmp_path: Path) -> None:
    sizes = []
    process = psutil.Process()

    async def source() -> AsyncIterator[str]:
        for number in range(1500):
            if number in (300, 1499):
                sizes.append(process.memory_info().rss)
            yield f"{number} " + "x" * 20_000  # 24 MB between the two measurements

    async with echo.client() as client:
        run = client.completions.map(source(), model="m", concurrency=16, output=tmp_path / "out.jsonl")
        async for one in run:
            echo.asked.clear()
            echo.answered.clear()
            assert one.error is None
    assert sizes[1] - sizes[0] < 10e6


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_map_progress_line_shows_count_rate_and_time_left() -> None:
    now = 0.0
    shown = Terminal()
    progress = MappingProgress(shown, 1000, lambda: now)
    progress.skipped = 200
    for _ in range(100):
        now += 0.0625  # a binary fraction, so that sums are exact
        progress.answered += 1
        progress.update()
    progress.failed += 1
    assert progress.line() == "301/1000 (30%), 16.2/s, 200 from an earlier run, 1 failed, 43 s left"
    progress.end()
    assert shown.getvalue().count("\r") == 51
    assert shown.getvalue().endswith("43 s left\n")


def test_map_progress_in_a_file_is_a_line_every_ten_seconds() -> None:
    now = 0.0
    shown = io.StringIO()
    progress = MappingProgress(shown, None, lambda: now)
    for _ in range(100):
        now += 0.25
        progress.answered += 1
        progress.update()
    assert shown.getvalue() == "40, 4.0/s\n80, 4.0/s\n"


async def test_map_progress_goes_to_stderr_when_requested(echo: EchoServer, capsys: pytest.CaptureFixture[str]) -> None:
    async with echo.client() as client:
        [one async for one in client.completions.map(prompts(5), model="m")]
        assert capsys.readouterr().err == ""
        [one async for one in client.completions.map(prompts(5), model="m", progress=True)]
    assert capsys.readouterr().err.startswith("5/5 (100%), ")


async def test_closing_the_client_ends_a_map_run(echo: EchoServer) -> None:
    client = echo.client()
    run = client.completions.map(endless(), model="m", concurrency=3, on_error="return")
    await anext(run)
    await client.close()
    with pytest.raises((RuntimeError, TokError)):
        [one.result() async for one in run]

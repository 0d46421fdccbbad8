"""Texts with special tokens and with what ended them: `skip_special_tokens` and `include_stop_str_in_output`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.engines import assert_all_given_back, manager_of
from support.tiny_models import make_model
from tok_core import AsyncEngine, Engine, EngineConfig, SamplingParams
from tok_core.sampling_params import Grammar


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncEngine]:
    path = make_model("llama", tmp_path_factory.mktemp("whole") / "tiny")
    engine = AsyncEngine(
        EngineConfig(model=str(path), kv_cache_tokens=16_384, max_running=16, dtype="float32", device="cpu"),
        in_process=True,
    )
    asyncio.run(engine.start())
    yield engine
    assert_all_given_back(manager_of(engine))
    asyncio.run(engine.close())


async def texts(engine: AsyncEngine, **fields: Any) -> list[tuple[str, str | None]]:
    """Return text and finish reason of one greedy sample, whole and streamed."""
    params = SamplingParams(**{"temperature": 0, "max_tokens": 12, **fields})
    (whole,) = (await engine.generate([3, 4, 5], params, stream=False).output()).outputs
    text, reason = "", None
    async for delta in engine.generate([3, 4, 5], params):
        text += delta.text
        reason = delta.finish_reason
    return [(whole.text, whole.finish_reason), (text, reason)]


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, "Q"),
        ({"include_stop_str_in_output": True}, "QZJ"),
        ({"stop": ["ZJ", "J"], "include_stop_str_in_output": True}, "QZJ"),
    ],
)
async def test_stop_string_is_shown_up_to_its_end_if_asked(
    engine: AsyncEngine, fields: dict[str, Any], shown: str
) -> None:
    grammar = Grammar(kind="choice", value='["QZJVVVVV"]')
    found = await texts(engine, grammar=grammar, **{"stop": ["ZJ"], **fields})
    assert found == [(shown, "stop")] * 2


@pytest.mark.parametrize(("included", "shown"), [(False, "QZ"), (True, "QZJ")])
async def test_stop_token_is_shown_if_asked(engine: AsyncEngine, included: bool, shown: str) -> None:
    assert engine.tokenizer is not None
    (stop,) = engine.tokenizer.encode("J", add_special_tokens=False)
    grammar = Grammar(kind="choice", value='["QZJVVVVV"]')
    found = await texts(engine, grammar=grammar, stop_token_ids=[stop], include_stop_str_in_output=included)
    assert found == [(shown, "stop")] * 2


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, ""),
        ({"skip_special_tokens": False}, ""),
        ({"include_stop_str_in_output": True}, ""),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "<|end_of_text|>"),
    ],
)
async def test_end_token_is_shown_only_if_special_tokens_are_and_the_stop_is(
    engine: AsyncEngine, fields: dict[str, Any], shown: str
) -> None:
    eos = engine.info.eos_token_ids[0]
    assert await texts(engine, allowed_token_ids=[eos], **fields) == [(shown, "stop")] * 2


async def test_special_tokens_are_part_of_the_text_if_asked(engine: AsyncEngine) -> None:
    eos = engine.info.eos_token_ids[0]
    only = {"allowed_token_ids": [eos], "ignore_eos": True, "max_tokens": 3}
    assert await texts(engine, **only) == [("", "length")] * 2
    assert await texts(engine, **only, skip_special_tokens=False) == [("<|end_of_text|>" * 3, "length")] * 2
    # A stop string across special tokens is found in the text as it is shown, never in that without them.
    found = await texts(engine, **only, skip_special_tokens=False, stop=["text|><|"])
    assert found == [("<|end_of_", "stop")] * 2


def test_the_end_token_of_the_tokenizer_ends_a_text_too(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path / "tuned")
    settings = path / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "eos_token": "J"}))
    with Engine(EngineConfig(model=str(path), kv_cache_tokens=1024, dtype="float32", device="cpu")) as engine:
        assert engine.tokenizer is not None
        (end,) = engine.tokenizer.encode("J", add_special_tokens=False)
        params = SamplingParams(max_tokens=3, allowed_token_ids=(end,))
        (kept,) = engine.generate([[3, 4, 5]], msgspec.structs.replace(params, ignore_eos=True))[0].outputs
        (ended,) = engine.generate([[3, 4, 5]], params)[0].outputs
    assert (kept.token_ids, kept.finish_reason) == ([end] * 3, "length")
    assert (ended.token_ids, ended.finish_reason) == ([end], "stop")

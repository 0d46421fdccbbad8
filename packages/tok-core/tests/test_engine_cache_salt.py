"""Requests with different cache salts share nothing in the prefix cache, and their tokens do not change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from support.engines import cpu_engine, manager_of, random_prompts
from support.grouping import group_eagerly
from support.replicas import replica_of, simulated_core
from support.schedules import engine_info
from support.tiny_models import make_model
from tok_core import AsyncEngine, Engine, EngineConfig, InvalidField, SamplingParams
from tok_core.engine.checks import MAX_CACHE_SALT, salt_of
from tok_core.messages import Submit

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPT, OTHER = random_prompts((100, 100))
WHOLE = 96  # tokens of the prompt's full pages, without the page of its last token


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama3", tmp_path_factory.mktemp("models") / "llama3")


def cached(engine: Engine, salt: str | None, n: int = 1) -> tuple[int, list[list[int]]]:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, n=n)
    (output,) = engine.generate([PROMPT], params, cache_salt=salt)
    return output.cached_tokens, [one.token_ids for one in output.outputs]


def test_cached_prompt_is_found_only_by_requests_with_the_same_salt(model: Path) -> None:
    with cpu_engine(model) as engine:
        first, tokens = cached(engine, None)
        assert first == 0
        for salt in ("one", "another", "o", "one\0"):
            assert cached(engine, salt) == (0, tokens)
            assert cached(engine, salt) == (WHOLE, tokens)
        assert cached(engine, None) == (WHOLE, tokens)


@pytest.mark.parametrize("n", [1, 5])
def test_concurrent_requests_with_different_salts_keep_their_tokens(model: Path, n: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, n=n)
    prompts = [PROMPT[:length] for length in (100, 100, 64, 80)]
    with cpu_engine(model) as engine:
        wanted = [[one.token_ids for one in output.outputs] for output in engine.generate(prompts, params)]
    with cpu_engine(model, max_step_tokens=64) as engine:  # prompts are computed in several chunks
        manager = manager_of(engine)
        group_eagerly(manager)
        # A stream starts at its first `next`: start all of them, so that they run at once.
        streams = [engine.stream(prompts, params, cache_salt=salt) for salt in ("one", "other", "third")]
        heads = [next(stream) for stream in streams]
        for stream, head in zip(streams, heads, strict=True):
            outputs = dict([head, *stream])
            assert [[one.token_ids for one in outputs[index].outputs] for index in range(len(prompts))] == wanted


def test_embeddings_use_only_cached_prompts_of_the_same_salt(model: Path) -> None:
    with cpu_engine(model) as engine:
        plain = engine.embed([PROMPT])[0]
        for salt, wanted in (("one", 0), ("one", WHOLE), ("other", 0)):
            (found,) = engine.embed([PROMPT], cache_salt=salt)
            assert found.cached_tokens == wanted
            np.testing.assert_allclose(found.embedding, plain.embedding, atol=1e-4)


async def test_async_engine_applies_cache_salts_to_generate_and_embed(model: Path) -> None:
    config = EngineConfig(model=str(model), device="cpu", kv_cache_tokens=4096, max_running=4)
    engine = AsyncEngine(config, in_process=True)
    await engine.start()
    found = []
    for salt in (None, "one", "one", "other"):
        stream = engine.generate(PROMPT, GREEDY, cache_salt=salt)
        async for _ in stream:
            pass
        found.append(stream.cached_tokens)
    embedded = [(await engine.embed([OTHER], cache_salt=salt))[0].cached_tokens for salt in ("one", "two", "one")]
    await engine.close()
    assert found == [0, 0, WHOLE, 0]
    assert embedded == [0, 0, WHOLE]


@pytest.mark.parametrize("salt", ["", "x" * (MAX_CACHE_SALT + 1), b"bytes", 5])
def test_invalid_cache_salt_is_refused(model: Path, salt: object) -> None:
    with cpu_engine(model) as engine:
        for ask in (engine.generate, engine.embed):
            with pytest.raises(InvalidField, match=r"cache_salt is .*; allowed: a string of 1 to"):
                ask([PROMPT], cache_salt=salt)  # type: ignore[arg-type]


def test_cache_salts_are_hashed_to_digests_of_one_length() -> None:
    assert salt_of(None) == b""
    assert {len(salt_of(salt)) for salt in ("a", "a" * 1000, "é", "\ud800")} == {16}
    assert salt_of("a") != salt_of("b")


def test_router_prefers_replicas_by_prefixes_of_the_same_salt_only() -> None:
    core = simulated_core(engine_info(max_model_len=512, num_pages=1024), dp=2)
    for number in range(2):
        replica_of(core, number).be_ready()
    prompt = list(range(40)) * 3
    params = SamplingParams(max_tokens=1)

    def placed(salt: str | None) -> int:
        request = core.submit(prompt, params, None, lambda requests: None, stream=False, cache_salt=salt)
        for number in range(2):
            replica_of(core, number).settle()
        return request.parts[0].replica

    first = placed("one")
    assert placed("two") == 1 - first  # no replica has its prefix: the least recently used one is chosen
    assert [placed("one") for _ in range(4)] == [first] * 4
    assert [placed("two") for _ in range(4)] == [1 - first] * 4
    core.close()


def test_request_keeps_its_cache_salt_when_dispatched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    core, seen = simulated_core(engine_info(), dp=2), list[bytes]()
    for number in range(2):
        replica_of(core, number).be_ready()
    send = core._replica_set.send

    def noted(replica: int, message: object, *, later: bool = False) -> None:
        if isinstance(message, Submit):
            seen.append(message.salt)
        send(replica, message, later=later)  # type: ignore[arg-type]

    monkeypatch.setattr(core._replica_set, "send", noted)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    request = core.submit([1, 2, 3], params, None, lambda requests: None, stream=False, cache_salt="one")
    lost = request.parts[0].replica
    replica_of(core, lost).die("it was told to")
    replica_of(core, 1 - lost).settle()
    assert seen == [salt_of("one")] * 2
    core.close()

"""Speculation changes no answer: with `batch_invariant`, tokens and log-probabilities are the same bits without it.

The worker drafts, as on a GPU, unless a test lets the manager draft, as on a CPU.
A second answer to a prompt is drafted from the first one, so that many drafts are right; other temperatures and seeds
make wrong ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from support.drafting import NEW, PARAMS, PLAIN, PROMPTS, STEM, WORDS, Answer, answer, answers
from support.engines import assert_all_given_back, cpu_engine, manager_of
from support.grouping import group_eagerly
from support.replayed_graphs import replay_decode_steps
from support.tiny_models import make_model, reference_greedy
from tok_core import AsyncEngine, Engine, EngineConfig, InvalidField, SamplingParams
from tok_core.config import Speculate
from tok_core.manager.speculation import DeviceSpeculator, HostSpeculator
from tok_core.messages import Float64
from tok_core.sampling_params import Grammar

pytestmark = pytest.mark.usefixtures("forked_children")

MANY = PARAMS | {
    "biases": SamplingParams(temperature=1.0, seed=5, logit_bias={5: 3.0, 9: 4.0}, max_tokens=NEW, logprobs=1),
    "allowed": SamplingParams(temperature=1.0, seed=7, allowed_token_ids=tuple(range(3, 20)), max_tokens=NEW),
    "two_tokens": SamplingParams(n=2, temperature=0, max_tokens=2),
}


@pytest.fixture(autouse=True)
def drafts_on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers on a CPU draft as on a GPU."""
    monkeypatch.setattr("tok_core.worker.startup.setup.DRAFTING_DEVICES", ("cuda", "cpu"))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama3", tmp_path_factory.mktemp("speculation") / "tiny", max_positions=256)


@pytest.fixture(scope="module")
def expected(path: Path) -> list[Answer]:
    """Return the answers without speculation."""
    with cpu_engine(path, batch_invariant=True) as engine:
        return answers(engine, MANY)


@pytest.mark.parametrize(
    ("speculate", "options"),
    [
        (1, {"max_running": 256}),
        (4, {"page_size": 4, "run_ahead": 4, "max_running": 256}),
        (4, {"page_size": 4, "kv_cache_tokens": 640, "max_running": 32}),  # preempts
        (16, {"page_size": 1, "max_step_tokens": 48, "max_running": 16, "run_ahead": 1}),
        (8, {"prefix_groups": False, "max_running": 256}),
    ],
)
def test_drafts_change_no_bit_of_any_answer(
    path: Path, expected: list[Answer], speculate: int, options: dict[str, Any]
) -> None:
    with cpu_engine(path, batch_invariant=True, speculate=speculate, max_model_len=128, **options) as engine:
        group_eagerly(manager_of(engine))
        for _ in range(3):
            assert answers(engine, MANY) == expected
        stats = engine.stats()
    assert stats["accepted_tokens"] > 10
    assert stats["drafted_tokens"] > stats["accepted_tokens"]
    assert stats["preemptions"] > 0 or "kv_cache_tokens" not in options


@pytest.mark.parametrize(
    ("speculate", "options"),
    [
        (4, {"page_size": 4, "kv_cache_tokens": 640, "max_running": 32}),  # preempts
        (16, {"page_size": 1, "max_step_tokens": 48, "max_running": 16, "run_ahead": 1}),
    ],
)
def test_replayed_steps_with_drafts_change_no_bit_of_any_answer(
    path: Path, expected: list[Answer], speculate: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = replay_decode_steps(monkeypatch)
    with cpu_engine(path, batch_invariant=True, speculate=speculate, max_model_len=128, **options) as engine:
        group_eagerly(manager_of(engine))
        for _ in range(3):
            assert answers(engine, MANY) == expected
        assert engine.stats()["accepted_tokens"] > 10
    assert {key.drafts for key in graphs} == {False, True}


def test_replayed_steps_with_guided_drafts_change_no_bit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = replay_decode_steps(monkeypatch)
    check_guided(path, {})
    assert any(key.drafts for key in graphs)


@pytest.fixture
def drafts_on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the manager draft, as on a CPU."""
    monkeypatch.setattr("tok_core.worker.startup.setup._predicts_drafts", lambda settings, backend: False)


@pytest.mark.usefixtures("drafts_on_host")
@pytest.mark.parametrize(
    ("speculate", "options"),
    [
        (8, {"run_ahead": 4, "max_running": 256}),
        (4, {"page_size": 4, "kv_cache_tokens": 640, "max_running": 32}),  # preempts
    ],
)
def test_drafts_of_the_host_change_no_bit_of_any_answer(
    path: Path, expected: list[Answer], speculate: int, options: dict[str, Any]
) -> None:
    with cpu_engine(path, batch_invariant=True, speculate=speculate, max_model_len=128, **options) as engine:
        group_eagerly(manager_of(engine))
        assert isinstance(manager_of(engine).speculator, HostSpeculator)
        for _ in range(3):
            assert answers(engine, MANY) == expected
        stats = engine.stats()
        assert_all_given_back(manager_of(engine))
    assert stats["accepted_tokens"] > 10
    assert stats["preemptions"] > 0 or "kv_cache_tokens" not in options


@pytest.mark.parametrize(("running", "most"), [(1, 5), (3, 15), (8, 16)])
def test_full_engine_drafts_in_slots_beyond_max_running(path: Path, running: int, most: int) -> None:
    params = SamplingParams(n=running, temperature=0, max_tokens=NEW, ignore_eos=True)
    with cpu_engine(path, speculate=4, max_running=running, max_step_tokens=16) as engine:
        assert engine.info.max_running + engine.info.draft_slots == most
        found = [one.token_ids for _ in range(2) for one in engine.generate([STEM], params)[0].outputs]
        assert found == [reference_greedy(path, [STEM], NEW)[0][0]] * 2 * running
        assert engine.stats()["accepted_tokens"] > NEW // 2


@pytest.mark.parametrize("kind", ["llama3", "qwen2", "qwen3"])
def test_greedy_tokens_equal_those_of_transformers(kind: str, tmp_path: Path) -> None:
    path = make_model(kind, tmp_path / kind)
    wanted = reference_greedy(path, PROMPTS, NEW)
    with cpu_engine(path, speculate=4) as engine:
        for _ in range(3):
            for output, (tokens, logprobs) in zip(engine.generate(PROMPTS, PARAMS["greedy"]), wanted, strict=True):
                (sample,) = output.outputs
                assert sample.token_ids == tokens
                assert sample.logprobs is not None
                np.testing.assert_allclose([one.logprob for one in sample.logprobs], logprobs, atol=1e-3)
        assert engine.stats()["accepted_tokens"] > NEW * len(PROMPTS)


def test_drafts_of_any_size_change_no_bit_of_any_answer(path: Path, expected: list[Answer]) -> None:
    """Measured step times decide how much is drafted with `auto`; here, chance does."""
    rng = np.random.default_rng(0)

    def choose(sequences: int, probability: Float64) -> int:
        return int(rng.integers(0, len(probability) + 1))

    with cpu_engine(path, batch_invariant=True, speculate="auto", max_model_len=128, max_running=256) as engine:
        speculator = manager_of(engine).speculator
        assert isinstance(speculator, DeviceSpeculator)
        setattr(speculator.costs, "choose", choose)  # noqa: B010
        setattr(speculator.costs, "allows", lambda sequences: True)  # noqa: B010
        for _ in range(3):
            assert answers(engine, MANY) == expected
        stats = engine.stats()
    assert stats["accepted_tokens"] > 10


FRUIT = '{"type": "array", "items": {"enum": ["apples", "baskets", "dogs"]}, "maxItems": 9}'
JSON = Grammar(kind="json_schema", value=FRUIT)
FREE = Grammar(kind="regex", value="[a-z ]{20,60}( and [0-9]+)?")
GUIDED = {
    "free": SamplingParams(n=4, temperature=1.0, seed=5, grammar=FREE, max_tokens=NEW, logprobs=0),
    "free_greedy": SamplingParams(n=2, temperature=0, grammar=FREE, max_tokens=NEW, repetition_penalty=1.3),
    "words": SamplingParams(n=3, temperature=1.0, seed=9, grammar=WORDS, max_tokens=NEW, logprobs=2),
    "greedy": SamplingParams(temperature=0, grammar=WORDS, max_tokens=NEW),
    "json": SamplingParams(n=4, temperature=0.7, seed=2, grammar=JSON, max_tokens=80),
    "penalties": SamplingParams(temperature=0.9, seed=3, grammar=JSON, max_tokens=30, presence_penalty=0.5, logprobs=1),
    "bad_words": SamplingParams(temperature=0.9, seed=4, grammar=WORDS, max_tokens=NEW, bad_words=("dogs",)),
    "plain": PLAIN,
}


@pytest.mark.parametrize("options", [{}, {"page_size": 4, "kv_cache_tokens": 512, "max_running": 24}])
def test_drafts_of_guided_sequences_change_no_bit(path: Path, options: dict[str, Any]) -> None:
    check_guided(path, options)


@pytest.mark.usefixtures("drafts_on_host")
def test_drafts_of_the_host_for_guided_sequences_change_no_bit(path: Path) -> None:
    check_guided(path, {})


def check_guided(path: Path, options: dict[str, Any]) -> None:
    """Check that guided sequences are drafted, and that their answers are those without drafts."""
    asked = [(prompt, params) for params in GUIDED.values() for prompt in PROMPTS[:3]]
    prompts, params = map(list, zip(*asked, strict=True))
    with cpu_engine(path, batch_invariant=True, max_model_len=128) as engine:
        wanted = [answer(output) for output in engine.generate(prompts, params)]
        steps = engine.stats()["steps"]
    with cpu_engine(path, batch_invariant=True, max_model_len=128, speculate=8, **options) as engine:
        for _ in range(4):
            before = engine.stats()
            assert [answer(output) for output in engine.generate(prompts, params)] == wanted
        assert_all_given_back(manager_of(engine))
        stats = engine.stats()
        guided = [engine.generate(prompts[:12], params[:12]) for _ in range(3)]
        assert [answer(output) for output in guided[-1]] == wanted[:12]
        after = engine.stats()
    assert after["accepted_tokens"] - stats["accepted_tokens"] > 20, "of guided sequences alone"
    assert options or stats["steps"] - before["steps"] < steps


def test_auto_answers_as_without_drafts(path: Path, expected: list[Answer]) -> None:
    with cpu_engine(path, batch_invariant=True, speculate="auto", max_model_len=128, max_running=256) as engine:
        for _ in range(2):
            assert answers(engine, MANY) == expected


def test_repeated_seeded_sample_takes_a_third_of_the_steps(path: Path) -> None:
    with cpu_engine(path, speculate=7, run_ahead=2) as engine:
        (first,) = engine.generate([STEM], PLAIN)
        steps = engine.stats()["steps"]
        (again,) = engine.generate([STEM], PLAIN)
        assert [one.token_ids for one in again.outputs] == [one.token_ids for one in first.outputs]
        assert engine.stats()["steps"] - steps <= steps / 3


def test_tokens_of_ended_samples_are_dropped(path: Path) -> None:
    params = msgspec.structs.replace(
        PLAIN, n=8, max_tokens=60, ignore_eos=False, stop_token_ids=tuple(range(0, 500, 20))
    )
    with cpu_engine(path, run_ahead=6) as engine:
        (plain,) = engine.generate([STEM], params)
    with cpu_engine(path, run_ahead=6, speculate=8) as engine:
        for _ in range(3):
            (output,) = engine.generate([STEM], params)
            assert [one.token_ids for one in output.outputs] == [one.token_ids for one in plain.outputs]
        stats = engine.stats()
    assert stats["discarded_tokens"] > 0
    assert stats["accepted_tokens"] > 0


def test_samples_that_cannot_be_predicted_are_hardly_drafted(path: Path) -> None:
    params = msgspec.structs.replace(PLAIN, n=32, temperature=0.7, max_tokens=100)
    with cpu_engine(path, speculate=8, max_running=256) as engine:
        engine.generate([STEM], params)
        stats = engine.stats()
    assert stats["output_tokens"] == 3200
    assert stats["drafted_tokens"] < 0.1 * stats["output_tokens"]


def test_samples_learn_from_each_other_but_not_across_salts(path: Path) -> None:
    with cpu_engine(path, speculate=4) as engine:
        accepted = [0.0]
        for salt in ("a", "b", "b"):
            engine.generate([STEM], PLAIN, cache_salt=salt)
            accepted.append(engine.stats()["accepted_tokens"])
    first, other, same = np.diff(accepted).tolist()
    assert first == other < same


@pytest.mark.parametrize("ending", ["stop", "stop_token_ids"])
def test_sample_ends_at_a_stop_within_a_draft(path: Path, ending: str) -> None:
    with cpu_engine(path, speculate=8) as engine:
        for _ in range(2):
            (whole,) = engine.generate([STEM], PLAIN)[0].outputs
        text, tokens, half = whole.text, list(whole.token_ids), range(NEW // 2, NEW)
        strings = [text[i : i + 2] for i in half if text[i : i + 2].isascii() and text.find(text[i : i + 2]) == i]
        stop = strings[0] if ending == "stop" else next(tokens[i] for i in half if tokens[i] not in tokens[:i])
        steps = engine.stats()["steps"]
        (cut,) = engine.generate([STEM], msgspec.structs.replace(PLAIN, **{ending: (stop,)}))[0].outputs
        assert engine.stats()["steps"] - steps < NEW / 4
    assert cut.finish_reason == "stop"
    assert cut.stop_reason == stop
    assert list(cut.token_ids) == tokens[: len(cut.token_ids)]
    if isinstance(stop, str):
        assert cut.text == text[: text.index(stop)]
    else:
        assert tokens.index(stop) in (len(cut.token_ids), len(cut.token_ids) - 1)


async def test_streamed_tokens_come_in_order(path: Path) -> None:
    config = EngineConfig(model=str(path), dtype="float32", device="cpu", kv_cache_tokens=4096, speculate=8)
    engine = AsyncEngine(config, in_process=True)
    await engine.start()
    found = []
    for _ in range(2):
        streamed = list[int]()
        async for delta in engine.generate(STEM, PLAIN):
            streamed += delta.token_ids
        found.append(streamed)
    assert len(found[0]) == NEW
    assert found[0] == found[1]
    assert engine.stats()["accepted_tokens"] > NEW / 2
    assert_all_given_back(manager_of(engine))
    await engine.close()


@pytest.mark.parametrize("wrong", [0, 17, -1, "on", None, True, 2.0])
def test_speculate_is_off_or_a_number_of_tokens(wrong: object) -> None:
    with pytest.raises(InvalidField, match=r"speculate is .*allowed: off, auto, or integers from 1 to 16"):
        EngineConfig(model="m", speculate=wrong)  # type: ignore[arg-type]


def test_draft_model_in_a_pipeline_is_refused_by_name() -> None:
    with pytest.raises(InvalidField, match="draft is 'small'; allowed: only if pp is 1"):
        EngineConfig(model="m", speculate="auto", draft="small", pp=2)


@pytest.mark.parametrize(
    ("speculate", "options"),
    [
        (4, {"page_size": 4, "kv_cache_tokens": 640, "max_running": 32}),  # preempts
        (16, {"page_size": 1, "max_step_tokens": 96, "max_running": 48, "run_ahead": 4}),
        ("auto", {"max_running": 256}),
    ],
)
def test_pipeline_with_drafts_gives_every_bit_of_one_worker(
    path: Path, expected: list[Answer], speculate: Speculate, options: dict[str, Any]
) -> None:
    with pipeline(path, speculate, **options) as engine:
        for _ in range(3):
            assert answers(engine, MANY) == expected
        stats = engine.stats()
    assert stats["accepted_tokens"] > 10 or speculate == "auto"
    assert stats["preemptions"] > 0 or "kv_cache_tokens" not in options


def test_pipeline_drafts_for_guided_sequences_and_changes_no_bit(path: Path) -> None:
    asked = [(prompt, params) for params in GUIDED.values() for prompt in PROMPTS[:3]]
    prompts, params = map(list, zip(*asked, strict=True))
    with cpu_engine(path, batch_invariant=True, max_model_len=128) as engine:
        wanted = [answer(output) for output in engine.generate(prompts, params)]
    with pipeline(path, 8) as engine:
        for _ in range(3):
            assert [answer(output) for output in engine.generate(prompts, params)] == wanted
        before = engine.stats()["accepted_tokens"]
        assert [answer(output) for output in engine.generate(prompts[:12], params[:12])] == wanted[:12]
        assert engine.stats()["accepted_tokens"] - before > 10, "of guided sequences alone"


def test_sample_of_a_pipeline_ends_at_a_stop_string_within_a_draft(path: Path) -> None:
    with pipeline(path, 8) as engine:
        for _ in range(2):
            (whole,) = engine.generate([STEM], PLAIN)[0].outputs
        text, half = whole.text, len(whole.text) // 2
        stop = next(text[i : i + 2] for i in range(half, len(text)) if text.find(text[i : i + 2]) == i)
        steps = engine.stats()["steps"]
        (cut,) = engine.generate([STEM], msgspec.structs.replace(PLAIN, stop=(stop,)))[0].outputs
        assert engine.stats()["steps"] - steps < NEW / 4
    assert cut.text == text[: text.index(stop)]
    assert cut.stop_reason == stop


def pipeline(path: Path, speculate: Speculate, **options: Any) -> Engine:
    """Return an engine with a pipeline of two stages on CPUs."""
    settings = {"kv_cache_tokens": 8192, "max_model_len": 128, "batch_invariant": True, **options}
    return Engine(EngineConfig(model=str(path), device="cpu", dtype="float32", pp=2, speculate=speculate, **settings))


@pytest.mark.parametrize("pp", [1, 2])
def test_tensor_parallel_ranks_verify_drafts(path: Path, pp: int) -> None:
    config = EngineConfig(
        model=str(path), device="cpu", dtype="float32", tp=2, pp=pp, batch_invariant=True, kv_cache_tokens=8192
    )
    params, found = [PARAMS["samples"], PARAMS["penalties"], GUIDED["free"], PARAMS["plain"]], []
    for speculate in ("off", 4):
        with Engine(msgspec.structs.replace(config, speculate=speculate)) as engine:
            found += [[answer(output) for output in engine.generate(PROMPTS, params)] for _ in range(2)]
            assert (engine.stats()["accepted_tokens"] > 0) == (speculate == 4)
    assert found[1:] == found[:1] * 3

"""The public API of Engine and AsyncEngine: parameters, outputs and errors."""

from __future__ import annotations

import asyncio
import math
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.engines import assert_all_given_back, cpu_engine, manager_of, random_prompts
from support.patience import PATIENCE
from support.paused_engine import gated
from support.short_lengths import PROMPT, SHORT
from support.tiny_models import make_model
from tok_core import AsyncEngine, Engine, EngineClosed, EngineConfig, EngineDead, InvalidField, SamplingParams

EOS = (321, 322)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("api") / "tiny-llama")


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[Engine]:
    with cpu_engine(path, max_running=16, kv_cache_tokens=4096) as one:
        yield one


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return random_prompts((24,))[0]


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 32, "ignore_eos": True, **values})


def tokens(engine: Engine, prompt: list[int] | str, **values: Any) -> list[int]:
    return engine.generate([prompt], params(**values))[0].outputs[0].token_ids


def test_submit_refuses_a_tenant_that_is_no_short_string(engine: Engine) -> None:
    prompt: list[int] = [1, 2, 3]
    for tenant in ("a" * 257, None, 3):
        with pytest.raises(InvalidField, match="tenant"):
            engine._core.submit(prompt, params(), None, lambda _: None, stream=False, tenant=tenant)  # type: ignore[arg-type]


def test_output_has_prompt_samples_logprobs_timings_and_text(engine: Engine, prompt: list[int]) -> None:
    (output,) = engine.generate([prompt], params(n=3, temperature=1.0, seed=7, logprobs=2))
    assert output.prompt_token_ids == prompt
    assert [sample.index for sample in output.outputs] == [0, 1, 2]
    assert len({tuple(sample.token_ids) for sample in output.outputs}) == 3
    timings = output.timings
    assert timings.first_token is not None
    assert timings.finished is not None
    assert timings.submitted <= timings.first_token <= timings.finished
    for sample in output.outputs:
        assert sample.logprobs is not None
        assert [one.token_id for one in sample.logprobs] == sample.token_ids
        for one in sample.logprobs:
            assert len(one.top) == 2
            assert one.top[0][1] >= one.top[1][1]
            assert one.logprob <= one.top[0][1] + 1e-6
        assert engine.tokenizer is not None
        assert sample.text == engine.tokenizer.decode(sample.token_ids)


def test_text_prompt_and_its_token_ids_give_the_same_tokens(engine: Engine) -> None:
    assert engine.tokenizer is not None
    ids = engine.tokenizer.encode("the cat sat")
    assert tokens(engine, "the cat sat") == tokens(engine, ids)


def test_each_prompt_may_have_its_own_sampling_params(engine: Engine, prompt: list[int]) -> None:
    outputs = engine.generate([prompt, prompt], [params(max_tokens=3), params(max_tokens=5)], progress=True)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 5]
    done = [index for index, _ in engine.stream([prompt, prompt], [params(max_tokens=40), params(max_tokens=2)])]
    assert done == [1, 0]


@pytest.mark.parametrize("extra", [{}, {"top_k": 40}, {"top_p": 0.9}, {"frequency_penalty": 0.5}, {"min_p": 0.01}])
def test_seeded_request_repeats_its_tokens_alone_and_in_a_batch(
    engine: Engine, prompt: list[int], extra: dict[str, float]
) -> None:
    seeded = params(temperature=0.9, seed=11, n=2, **extra)
    alone = [sample.token_ids for sample in engine.generate([prompt], seeded)[0].outputs]
    others = random_prompts(tuple(range(1, 63)), seed=3)
    batch = engine.generate([*others, prompt, prompt], [params(temperature=1.0)] * 62 + [seeded, seeded])
    assert [sample.token_ids for sample in batch[62].outputs] == alone
    assert [sample.token_ids for sample in batch[63].outputs] == alone
    assert [s.token_ids for s in engine.generate([prompt], params(temperature=0.9, seed=12, n=2))[0].outputs] != alone


def test_seeded_requests_repeat_their_tokens_after_preemption(path: Path, engine: Engine) -> None:
    asked = random_prompts((60, 70, 80, 90, 100, 110), seed=4)
    # A stop token that is possible but never sampled: the scheduler cannot know that samples run to max_tokens.
    ending = {"stop_token_ids": (0,), "logit_bias": {0: -100.0}}
    seeded = params(temperature=0.8, seed=5, max_tokens=64, presence_penalty=0.5, **ending)
    with cpu_engine(path, kv_cache_tokens=256, page_size=4, max_model_len=256) as small:
        small.generate([PROMPT], SHORT)
        outputs = small.generate(asked, seeded)
        assert small.stats()["preemptions"] > 0
    alone = [engine.generate([one], seeded)[0] for one in asked]
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in alone]


def test_requests_without_a_seed_sample_different_tokens(engine: Engine, prompt: list[int]) -> None:
    first, second = engine.generate([prompt, prompt], params(temperature=1.0))
    assert first.outputs[0].token_ids != second.outputs[0].token_ids


def test_eos_and_stop_token_ids_end_the_sample(engine: Engine, prompt: list[int]) -> None:
    free = tokens(engine, prompt)
    stop = free[10]
    first = free.index(stop)
    (output,) = engine.generate([prompt], params(stop_token_ids=(stop,)))
    sample = output.outputs[0]
    assert (sample.token_ids, sample.finish_reason, sample.stop_reason) == (free[: first + 1], "stop", stop)
    assert engine.tokenizer is not None
    assert sample.text == engine.tokenizer.decode(free[:first])
    bias = {EOS[0]: 100.0}
    (output,) = engine.generate([prompt], params(logit_bias=bias, ignore_eos=False))
    sample = output.outputs[0]
    assert (sample.token_ids, sample.finish_reason, sample.stop_reason) == ([EOS[0]], "stop", None)
    assert sample.text == ""
    assert tokens(engine, prompt, logit_bias=bias, max_tokens=4) == [EOS[0]] * 4  # ignore_eos is set


def test_min_tokens_delays_eos_stop_token_ids_and_stop_strings(engine: Engine, prompt: list[int]) -> None:
    bias = {EOS[0]: 100.0}
    held = tokens(engine, prompt, logit_bias=bias, ignore_eos=False, min_tokens=5)
    assert len(held) == 6
    assert held[5] == EOS[0]
    assert not set(held[:5]) & set(EOS)
    free = tokens(engine, prompt)
    held = tokens(engine, prompt, stop_token_ids=(free[0],), min_tokens=8)
    assert free[0] not in held[:8]
    assert len(held) >= 8
    assert engine.tokenizer is not None
    text = engine.tokenizer.decode(free)
    assert len(tokens(engine, prompt, stop=(text[0],), min_tokens=20)) >= 20


def test_stop_string_ends_the_sample_and_is_cut_from_the_text(engine: Engine, prompt: list[int]) -> None:
    assert engine.tokenizer is not None
    free = tokens(engine, prompt)
    pieces = [engine.tokenizer.piece(token) for token in free]
    text = b"".join(pieces).decode(errors="replace")
    for start, length in ((5, 1), (9, 4), (3, 12)):
        stop = text[start : start + length]
        if "\ufffd" in stop:
            continue
        (output,) = engine.generate([prompt], params(stop=("never in it", stop)))
        sample = output.outputs[0]
        assert sample.text == text[: text.index(stop)]
        assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)
        kept = b"".join(pieces[: len(sample.token_ids)])
        assert stop.encode() in kept
        assert stop.encode() not in b"".join(pieces[: len(sample.token_ids) - 1])


def test_penalties_and_logit_bias_change_the_sampled_tokens(engine: Engine, prompt: list[int]) -> None:
    free = tokens(engine, prompt, max_tokens=48)
    assert len(set(free)) < 48
    never_twice = tokens(engine, prompt, max_tokens=48, presence_penalty=2.0, logit_bias={free[0]: -100.0})
    assert free[0] not in never_twice
    assert len(set(tokens(engine, prompt, max_tokens=48, repetition_penalty=1000.0))) > len(set(free))


def test_request_without_max_tokens_stops_at_max_model_len(path: Path) -> None:
    with cpu_engine(path, max_model_len=48) as one:
        (output,) = one.generate(random_prompts((40,)), params(max_tokens=None))
        assert len(output.outputs[0].token_ids) == 8
        assert output.outputs[0].finish_reason == "length"


REFUSED: list[tuple[str, Any, dict[str, Any]]] = [
    ("prompts[1]", [], {}),
    ("prompts[1]", [5, 512], {}),
    ("prompts[1]", [-1], {}),
    ("prompts[1]", [1, 2**40], {}),
    ("prompts[1]", [1, True], {}),
    ("prompts[1]", [1, 2.5], {}),
    ("prompts[1]", [1] * 2000, {}),
    ("max_tokens", [1] * 1000, {"max_tokens": 500}),
    ("max_tokens", [1], {"max_tokens": -1}),
    ("n", [1], {"n": 0}),
    ("n", [1], {"n": -3}),
    ("temperature", [1], {"temperature": float("nan")}),
    ("temperature", [1], {"temperature": -0.5}),
    ("top_p", [1], {"top_p": 0}),
    ("min_p", [1], {"min_p": 1.5}),
    ("top_k", [1], {"top_k": -5}),
    ("presence_penalty", [1], {"presence_penalty": 3}),
    ("logprobs", [1], {"logprobs": 50}),
    ("stop", [1], {"stop": ("",)}),
    ("stop", [1], {"stop": (np.str_("a subclass cannot be sent"),)}),
    ("stop_token_ids", [1], {"stop_token_ids": (9999,)}),
    ("logit_bias", [1], {"logit_bias": {9999: 1.0}}),
    ("logit_bias", [1], {"logit_bias": {5: float("inf")}}),
    ("min_tokens", [1], {"min_tokens": 50, "max_tokens": 10}),
    ("seed", [1], {"seed": 2**70}),
]


@pytest.mark.parametrize(("field", "ids", "values"), REFUSED)
def test_invalid_request_is_refused_by_field_and_the_next_one_is_served(
    engine: Engine, prompt: list[int], field: str, ids: list[int], values: dict[str, Any]
) -> None:
    with pytest.raises(InvalidField, match=re.escape(field)) as caught:
        engine.generate([prompt, ids], params(**values))
    assert caught.value.field == field
    assert len(tokens(engine, prompt, max_tokens=2)) == 2


def test_a_tiny_temperature_is_greedy(engine: Engine, prompt: list[int]) -> None:
    assert tokens(engine, prompt, temperature=1e-30) == tokens(engine, prompt)


def test_a_closed_engine_ends_open_requests(path: Path, prompt: list[int]) -> None:
    one = Engine(EngineConfig(model=str(path), device="cpu", kv_cache_tokens=2048, max_running=2), in_process=True)
    results = one.stream([prompt, prompt], [params(max_tokens=2), params(max_tokens=900)])
    assert next(results)[0] == 0
    one.close()
    with pytest.raises(EngineClosed):
        next(results)


@pytest.fixture
async def serving(path: Path) -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(model=str(path), device="cpu", kv_cache_tokens=2048, max_running=4, dtype="float32")
    one = AsyncEngine(config, in_process=True)
    await one.start()
    yield one
    manager = manager_of(one)
    assert_all_given_back(manager)
    await one.close()


async def test_deltas_add_up_to_the_output(serving: AsyncEngine, prompt: list[int]) -> None:
    asked = params(n=3, temperature=1.0, seed=1, logprobs=0)
    stream = serving.generate(prompt, asked)
    ids: dict[int, list[int]] = {0: [], 1: [], 2: []}
    texts = {0: "", 1: "", 2: ""}
    count = 0
    with gated(serving, steps=8) as gate:
        async for delta in stream:
            gate.open()  # no sample has ended; deltas that are not read in time are merged
            ids[delta.index] += delta.token_ids
            texts[delta.index] += delta.text
            count += 1
    whole = await serving.generate(prompt, asked).output()
    assert count > 3
    assert [sample.token_ids for sample in whole.outputs] == list(ids.values())
    assert [sample.text for sample in whole.outputs] == list(texts.values())


async def test_abort_frees_slots_and_pages_of_requests_in_every_state(serving: AsyncEngine, prompt: list[int]) -> None:
    rng = np.random.default_rng(0)
    asked = [random_prompts((int(rng.integers(1, 400)),), seed)[0] for seed in range(24)]
    streams = [serving.generate(one, params(n=1 + i % 4, max_tokens=200)) for i, one in enumerate(asked)]
    for i in rng.permutation(len(streams)):
        await asyncio.sleep(float(rng.uniform(0, 0.03)))
        streams[i].abort()
        output = await streams[i].output()
        assert {sample.finish_reason for sample in output.outputs} <= {"abort", "length"}
    assert len((await serving.generate(prompt, params(max_tokens=3)).output()).outputs[0].token_ids) == 3


async def test_requests_start_in_order_of_arrival(serving: AsyncEngine) -> None:
    order: list[int] = []

    async def one(i: int) -> None:
        async for _ in serving.generate(random_prompts((30,), i)[0], params(max_tokens=10)):
            if i not in order:
                order.append(i)

    await asyncio.gather(*(one(i) for i in range(40)))
    assert order == sorted(order)


async def test_request_stream_output_can_be_read_again(serving: AsyncEngine, prompt: list[int]) -> None:
    async with asyncio.timeout(PATIENCE):
        stream = serving.generate(prompt, params(n=2))
        async for _ in stream:
            pass
        whole = await stream.output()
        assert await stream.output() == whole
        early = serving.generate(prompt, params(n=2))
        async for _ in early:
            break
        assert [s.token_ids for s in (await early.output()).outputs] == [s.token_ids for s in whole.outputs]


async def test_cancelled_waiter_of_a_stream_does_not_affect_the_others(serving: AsyncEngine, prompt: list[int]) -> None:
    async with asyncio.timeout(PATIENCE):
        stream = serving.generate(prompt, params(n=2))
        waiting = [asyncio.create_task(stream.output()) for _ in range(3)]
        await asyncio.sleep(0)  # all tasks wait now
        waiting[1].cancel()
        first, _, last = await asyncio.gather(*waiting, return_exceptions=True)
        assert waiting[1].cancelled()
        assert first == last == await stream.output()
        assert not await stream.batch()


async def test_request_id_may_be_reused_and_the_old_stream_cannot_abort_it(
    serving: AsyncEngine, prompt: list[int]
) -> None:
    old = serving.generate(prompt, params(), request_id="mine")
    with pytest.raises(InvalidField, match="request_id"):
        serving.generate(prompt, params(), request_id="mine")
    await old.output()
    new = serving.generate(prompt, params(), request_id="mine")
    old.abort()
    assert (await new.output()).outputs[0].finish_reason == "length"


async def test_callback_that_raises_does_not_affect_other_requests(serving: AsyncEngine, prompt: list[int]) -> None:
    def fail(*news: object) -> None:
        raise RuntimeError("the owner's own")

    serving._core.submit(prompt, params(), None, fail, stream=True)
    assert len((await serving.generate(prompt, params()).output()).outputs[0].token_ids) == 32


async def test_async_engine_refuses_requests_before_start_and_a_second_start(path: Path, prompt: list[int]) -> None:
    engine = AsyncEngine(EngineConfig(model=str(path), device="cpu", kv_cache_tokens=1024), in_process=True)
    with pytest.raises(EngineDead, match="starting"):
        engine.generate(prompt)
    with pytest.raises(EngineClosed, match="not been started"):
        _ = engine.info
    await engine.start()
    with pytest.raises(EngineClosed, match="once"):
        await engine.start()
    assert len((await engine.generate(prompt, params(max_tokens=2)).output()).outputs[0].token_ids) == 2
    await engine.close()


@pytest.mark.parametrize(
    ("field", "values"), [("params", {"params": {"max_tokens": 2}}), ("request_id", {"request_id": 5})]
)
async def test_async_generate_refuses_arguments_of_a_wrong_type(
    serving: AsyncEngine, prompt: list[int], field: str, values: dict[str, Any]
) -> None:
    with pytest.raises(InvalidField) as caught:
        serving.generate(prompt, **values)
    assert caught.value.field == field


@pytest.mark.parametrize("kind", [Engine, AsyncEngine])
def test_an_engine_refuses_a_config_that_is_no_engine_config(kind: Any, path: Path) -> None:
    with pytest.raises(InvalidField, match=r"config is .*; allowed: an EngineConfig"):
        kind(str(path))


@pytest.mark.parametrize("prompt", [b"abc", 5, [True], [1.0], np.array([1, 2]), ["a"]])
def test_generate_refuses_values_that_are_no_prompt(engine: Engine, prompt: Any) -> None:
    with pytest.raises(InvalidField, match="prompt"):
        engine.generate([prompt])


@pytest.mark.parametrize("prompts", [iter([[1, 2]]), {(1, 2)}, {0: [1, 2]}, "text", 5])
def test_generate_refuses_prompts_that_are_no_list(engine: Engine, prompts: Any) -> None:
    with pytest.raises(InvalidField, match=r"prompts is .*; allowed: a list of prompts"):
        engine.generate(prompts)


@pytest.mark.parametrize("stream", [True, False])
async def test_lists_of_the_caller_may_change_after_the_call(
    serving: AsyncEngine, prompt: list[int], stream: bool
) -> None:
    expected = await serving.generate(prompt, params(prompt_logprobs=0)).output()
    own, stop, bias = prompt.copy(), ["\n\n"], {5: 1.0}
    asked = params(prompt_logprobs=0, stop=stop, logit_bias=bias)
    found = serving.generate(own, asked, stream=stream)
    own.extend([7] * 100)
    stop.append("")
    bias[5] = math.nan
    assert (asked.stop, asked.logit_bias) == (("\n\n",), {5: 1.0})
    output = await found.output()
    assert output.prompt_token_ids == prompt
    assert output.prompt_logprobs == expected.prompt_logprobs


def test_biases_that_have_become_invalid_are_refused_when_used(engine: Engine, prompt: list[int]) -> None:
    asked = params(logit_bias={5: 1.0})
    assert asked.logit_bias is not None
    asked.logit_bias[5] = -math.inf
    with pytest.raises(InvalidField, match="logit_bias is -inf; allowed: numbers from -100 to 100"):
        engine.generate([prompt], asked)
    assert engine.generate([prompt], params())


BAD_TYPES: list[dict[str, Any]] = [
    {"ignore_eos": 1},
    {"logit_bias": [1]},
    {"logit_bias": {5: np.float64(1)}},
    {"stop_token_ids": 5},
    {"stop": ("\ud800",)},
    {"stop": "text"},
    {"temperature": np.float64(0.5)},
    {"max_tokens": True},
]


@pytest.mark.parametrize("values", BAD_TYPES)
def test_sampling_params_refuse_values_of_a_wrong_type(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidField, match=next(iter(values))):
        SamplingParams(**values)


CONFIGURATIONS: list[dict[str, Any]] = [
    {"prefix_groups": 1},
    {"cuda_graphs": "no"},
    {"data_dir": 5},
    {"seed": 2**64},
    {"seed": 5},
    {"trace_steps": 5},
    {"trace_from": 40},
    {"gpu_memory_fraction": "x"},
    {"restart_window": "x"},
    {"step_timeout": 0},
    {"page_size": 3},
    {"tp": 0},
    {"async_tp_threshold": 512},
    {"ep": 1, "tp": 2},
    {"ep": True},
    {"redundant_experts": 2, "tp": 2},
    {"redundant_experts": -1, "tp": 2, "ep": True},
    {"redundant_experts": 2, "tp": 2, "ep": True, "batch_invariant": True},
    {"expert_rebalance_steps": 100, "tp": 2, "ep": True},
    {"moe_skew": 1.0},
    {"moe_skew": -1.0, "load_format": "dummy"},
    {"async_tp_threshold": -1, "tp": 2},
    {"device": "tpu"},
    {"backend": "fast"},
    {"kv_cache_tokens": 4},
]


@pytest.mark.parametrize("values", CONFIGURATIONS)
def test_engine_config_refuses_invalid_values(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidField, match=next(iter(values))):
        EngineConfig(model="m", **values)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("backend", {"backend": "triton"}),
        ("max_model_len", {"max_model_len": 1}),
        ("max_step_tokens", {"max_step_tokens": 4, "max_running": 8}),
    ],
)
def test_engine_start_refuses_unusable_configurations(path: Path, field: str, values: dict[str, Any]) -> None:
    with pytest.raises(InvalidField, match=field):
        Engine(EngineConfig(model=str(path), device="cpu", kv_cache_tokens=1024, **values), in_process=True)


def test_sampling_many_filtered_rows_in_portions_changes_no_token(path: Path, prompt: list[int]) -> None:
    asked = params(n=600, max_tokens=3, temperature=1.0, seed=2, top_p=0.9, presence_penalty=0.5, logprobs=1)
    with cpu_engine(path, max_running=600, max_step_tokens=1024) as wide, cpu_engine(path, max_running=8) as narrow:
        (one,), (other,) = wide.generate([prompt], asked), narrow.generate([prompt], asked)
    assert [s.token_ids for s in one.outputs] == [s.token_ids for s in other.outputs]


SCRIPT = """
import sys
from tok_core import Engine, EngineConfig, SamplingParams
engine = Engine(EngineConfig(model=sys.argv[1], device="cpu", kv_cache_tokens=1024), in_process=True)
engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
results = engine.stream([[1, 2, 3]], SamplingParams(max_tokens=900, ignore_eos=True))
sys.exit(3)
"""


def test_a_script_may_end_without_closing_its_engine(path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (3, "")

"""An unstreamed request returns the sum of the streamed deltas, and its owner is notified once per sample."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from support.engines import assert_all_given_back, manager_of, random_prompts
from support.patience import PATIENCE
from support.tiny_models import make_model
from tok_core import AsyncEngine, Completion, Delta, EngineClosed, EngineConfig, SamplingParams
from tok_core.engine import generation_requests, open_requests, output_router
from tok_core.engine.generation_requests import StreamedRequest
from tok_core.engine.open_requests import OpenRequest, StreamedTokens
from tok_core.engine.request_stream import MAX_WOKEN_STREAMS, Mailbox, RequestStream
from tok_core.manager.output_processor import EMPTY_REPORT
from tok_core.messages import Finished, Progress, Stats, Submit, ToEngine, ToManager
from tok_core.replicas.replica import Death, Report, ThreadReplica
from tok_core.text import Tokenizer

EOS = 321
PROMPT = random_prompts((24,))[0]
LONG = SamplingParams(n=3, max_tokens=900, temperature=1.0, seed=3, ignore_eos=True, logit_bias={300: 3.0, EOS: 3.0})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("whole") / "tiny-llama")


def config(path: Path) -> EngineConfig:
    return EngineConfig(model=str(path), device="cpu", kv_cache_tokens=8192, max_running=32, dtype="float32")


@pytest.fixture
async def engine(path: Path) -> AsyncIterator[AsyncEngine]:
    one = AsyncEngine(config(path), in_process=True)
    await one.start()
    yield one
    assert_all_given_back(manager_of(one))
    assert one._core._token_store.blocks_used == 0
    assert not one._core._open.each_token
    await one.close()


def added_up(deltas: list[Delta], n: int) -> list[Completion]:
    """Return the samples, put together from the streamed deltas."""
    found = []
    for index in range(n):
        mine = [delta for delta in deltas if delta.index == index]
        logprobs = None if mine[0].logprobs is None else [one for delta in mine for one in delta.logprobs or []]
        ids = [token for delta in mine for token in delta.token_ids]
        text = "".join(delta.text for delta in mine)
        assert mine[-1].finish_reason is not None
        found.append(Completion(index, ids, text, logprobs, mine[-1].finish_reason, mine[-1].stop_reason))
    return found


ASKED = st.builds(
    SamplingParams,
    n=st.integers(1, 4),
    max_tokens=st.integers(1, 40),
    temperature=st.just(1.5),
    seed=st.integers(0, 1000),
    stop=st.lists(st.text("the é|<日", min_size=1, max_size=2), max_size=3).map(tuple),
    stop_token_ids=st.lists(st.integers(0, 340), max_size=2).map(tuple),
    # Sample special tokens, end tokens and parts of characters often.
    logit_bias=st.dictionaries(st.integers(100, 511), st.floats(0, 4), max_size=12),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 2),
)


class Twins(ThreadReplica):
    """Replica that takes requests in pairs, runs the first, and repeats its reports for the second."""

    _first: Submit | None = None

    def __init__(self, config: EngineConfig, index: int, report: Report, death: Death) -> None:
        super().__init__(config, index, lambda message: report(_doubled(message)), death)

    def send(self, messages: Sequence[ToManager]) -> None:
        for message in messages:
            assert isinstance(message, Submit)
            if self._first is None:
                self._first = message
            else:
                super().send([self._first])
                self._first = None


def _doubled(message: ToEngine) -> ToEngine:
    if not isinstance(message, Progress):
        return message
    columns = ("sample", "token", "logprob", "top_token", "top_logprob")
    return replace(
        message,
        rid=np.concatenate([message.rid, message.rid + 1]),
        rounds=message.rounds * 2,
        finished=[*message.finished, *(replace(end, rid=end.rid + 1) for end in message.finished)],
        started=[*message.started, *((rid + 1, *rest) for rid, *rest in message.started)],
        **{name: np.concatenate([getattr(message, name)] * 2) for name in columns},
    )


def test_streamed_deltas_add_up_to_the_unstreamed_output(path: Path) -> None:
    async def both(params: SamplingParams) -> None:
        stream = twins.generate(PROMPT, params)
        whole = twins.generate(PROMPT, params, stream=False)
        deltas = [delta async for delta in stream]
        output = await whole.output()
        assert output.outputs == added_up(deltas, params.n) == (await stream.output()).outputs
        assert output.cached_tokens == stream.cached_tokens

    twins = AsyncEngine(config(path), in_process=True)
    twins._core._replica_set._make_replica = Twins
    with asyncio.Runner() as runner:
        runner.run(twins.start())

        @settings(max_examples=60, deadline=None)
        @given(ASKED)
        def check(params: SamplingParams) -> None:
            runner.run(asyncio.wait_for(both(params), 60))

        try:
            check()
        finally:
            runner.run(twins.close())


async def test_unstreamed_request_yields_one_delta_per_finished_sample(engine: AsyncEngine) -> None:
    params = [SamplingParams(n=2, max_tokens=count, temperature=0, ignore_eos=True) for count in (5, 70)]
    for one in params:
        stream = engine.generate(PROMPT, one, stream=False)
        deltas = [delta async for delta in stream]
        assert sorted((delta.index, len(delta.token_ids)) for delta in deltas) == [(i, one.max_tokens) for i in (0, 1)]
        output = await stream.output()
        assert output.outputs == added_up(deltas, 2)
        times = output.timings
        assert times.first_token is not None
        assert times.finished is not None
        assert times.started is not None
        assert times.submitted <= times.started < times.first_token < times.finished
        assert stream.lengths == [one.max_tokens] * 2
        assert stream.timings is times


async def test_timings_separate_the_wait_for_a_slot_from_the_prefill(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = AsyncEngine(replace(config(path), max_running=1), in_process=True)
    await engine.start()
    try:
        manager = manager_of(engine)

        def steps() -> float:
            return float(manager.scheduler.steps)

        for module in (generation_requests, open_requests, output_router):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=steps))
        monkeypatch.setattr(manager.scheduler.starter, "_clock", steps)
        one = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
        streams = [engine.generate(PROMPT, one, stream=stream) for stream in (True, False)]
        first, second = [(await stream.output()).timings for stream in streams]
        assert first.finished is not None
        assert second.started is not None
        assert second.first_token is not None
        waited, computed = second.started - second.submitted, first.finished - first.submitted
        assert computed - 5 < waited <= computed  # in steps, some of which are scheduled ahead
        assert 0 <= second.first_token - second.started < 5
    finally:
        await engine.close()


async def test_stream_batches_hold_at_most_one_delta_per_sample(engine: AsyncEngine) -> None:
    stream = engine.generate(PROMPT, SamplingParams(n=4, max_tokens=30, temperature=0, ignore_eos=True))
    batches = [batch async for batch in stream.batches()]
    assert sum(len(delta.token_ids) for batch in batches for delta in batch) == 4 * 30
    assert max(len(batch) for batch in batches) == 4
    assert [len(sample.token_ids) for sample in (await stream.output()).outputs] == [30] * 4


async def test_requests_of_one_event_loop_turn_are_sent_together(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = engine._core._replica_set.records[0].replica
    assert isinstance(replica, ThreadReplica)
    sent: list[int] = []
    send = replica.send

    def count(messages: Sequence[ToManager]) -> None:
        sent.append(len(messages))
        send(messages)

    monkeypatch.setattr(replica, "send", count)
    params = SamplingParams(max_tokens=2, temperature=0)
    streams = [engine.generate(PROMPT, params) for _ in range(10)]
    assert not sent
    await asyncio.gather(*(stream.output() for stream in streams))
    assert sent == [10]
    late = engine.generate(PROMPT, params)
    late.abort()  # sent in the same turn as the request, after it
    assert (await late.output()).outputs[0].finish_reason == "abort"
    assert sent == [10, 2]


async def test_mailbox_wakes_a_few_streams_per_event_loop_turn(engine: AsyncEngine) -> None:
    loop, params = asyncio.get_running_loop(), SamplingParams()
    mailbox = Mailbox(loop, engine._core)
    requests = [
        StreamedRequest(rid, str(rid), [1], params, mailbox.notify_owners, None)
        for rid in range(2 * MAX_WOKEN_STREAMS + 5)
    ]
    mailbox.streams = {one.rid: RequestStream(engine._core, one, mailbox.loop) for one in requests}
    mailbox.notify_owners(requests)
    woken: list[int] = []
    async with asyncio.timeout(PATIENCE):
        while not woken or woken[-1] < len(requests):
            await asyncio.sleep(0)
            woken.append(sum(not stream._queued for stream in mailbox.streams.values()))
    assert sorted({0, *woken}) == [0, MAX_WOKEN_STREAMS, 2 * MAX_WOKEN_STREAMS, len(requests)]


async def test_event_loop_is_woken_at_most_once_per_report(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    woken: list[Callable[..., object]] = []
    wake = loop.call_soon_threadsafe

    def count(callback: Callable[..., object], *arguments: Any) -> asyncio.Handle:
        woken.append(callback)
        return wake(callback, *arguments)

    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    before = engine.stats()["steps"]
    monkeypatch.setattr(loop, "call_soon_threadsafe", count)
    streams = [engine.generate(PROMPT, params, stream=i % 2 == 0) for i in range(24)]
    outputs = await asyncio.gather(*(stream.output() for stream in streams))
    monkeypatch.undo()
    assert [len(output.outputs[0].token_ids) for output in outputs] == [40] * 24
    steps = engine.stats()["steps"] - before
    assert 1 <= len(woken) <= steps < 24 * 40


async def test_owner_that_reads_nothing_is_notified_again_only_at_the_end(engine: AsyncEngine) -> None:
    told: list[tuple[bool, int]] = []

    def hear(requests: Sequence[OpenRequest]) -> None:
        told.extend((request.ended(), request.output_tokens) for request in requests)

    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    request = engine._core.submit(PROMPT, params, None, hear, stream=True)
    async with asyncio.timeout(PATIENCE):
        while not told or not told[-1][0]:
            await asyncio.sleep(0.01)
    assert [ended for ended, _ in told] == [False, True]
    assert told[0][1] < told[1][1] == 40
    (delta,) = request.take()
    assert (len(delta.token_ids), delta.finish_reason) == (40, "length")


async def test_stream_free_drops_log_probabilities_after_an_abort(engine: AsyncEngine) -> None:
    stream = engine.generate(PROMPT, SamplingParams(max_tokens=20, n=3, logprobs=2, ignore_eos=True), stream=False)
    output = await stream.output()
    assert [len(one.logprobs or ()) for one in output.outputs] == [20] * 3
    stream.abort()
    await asyncio.to_thread(stream.free)
    assert not any(one.logprobs for one in output.outputs)


async def test_aborted_unstreamed_request_returns_its_tokens_so_far(engine: AsyncEngine) -> None:
    full = (await engine.generate(PROMPT, LONG, stream=False).output()).outputs
    rng = np.random.default_rng(1)
    async with asyncio.timeout(PATIENCE):
        for _ in range(12):
            stream = engine.generate(PROMPT, LONG, stream=False)
            await asyncio.sleep(float(rng.uniform(0, 0.2)))
            stream.abort()
            for whole, part in zip(full, (await stream.output()).outputs, strict=True):
                assert part.finish_reason in ("abort", "length")
                assert part.token_ids == whole.token_ids[: len(part.token_ids)]
                assert engine.tokenizer is not None
                assert part.text == engine.tokenizer.decode(part.token_ids)


async def test_closing_the_engine_ends_unstreamed_requests(path: Path) -> None:
    engine = AsyncEngine(config(path), in_process=True)
    await engine.start()
    first = engine.generate(PROMPT, LONG)  # starts first, even if few requests may start at a time
    streams = [engine.generate(PROMPT, LONG, stream=False) for _ in range(4)]
    assert (await anext(aiter(first))).token_ids
    await engine.close()
    results = await asyncio.gather(*(stream.output() for stream in streams), return_exceptions=True)
    assert [type(result) for result in results] == [EngineClosed] * 4
    assert engine._core._token_store.blocks_used == 0


def test_unread_tokens_of_a_sample_are_merged_into_one_delta(path: Path) -> None:
    tokenizer = Tokenizer.load(path)
    ids = tokenizer.encode("日本 the", add_special_tokens=False)
    request = StreamedRequest(1, "one", [1], SamplingParams(n=2), lambda _: None, tokenizer)
    for token in ids[:-1]:
        request.advance(StreamedTokens([0], [token], [0], {1: (0, 1)}), {}, NOTHING_MORE)
    request.advance(StreamedTokens([1], [ids[0]], [0], {1: (0, 1)}), {}, NOTHING_MORE)
    first, other = request.take()
    assert (first.index, first.token_ids, first.finish_reason) == (0, ids[:-1], None)
    assert (other.index, other.token_ids) == (1, ids[:1])
    assert request.take() == []
    end = {0: Finished(1, 0, "length", len(ids))}
    request.advance(StreamedTokens([0], ids[-1:], [0], {1: (0, 1)}), end, NOTHING_MORE)
    request.abort("stop_when")
    last, aborted = request.take()
    assert (last.token_ids, last.finish_reason) == (ids[-1:], "length")
    assert first.text + last.text == "日本 the"
    assert (aborted.token_ids, aborted.finish_reason) == ([], "stop_when")
    assert [one.token_ids for one in request.output().outputs] == [ids, ids[:1]]


def test_finished_sample_releases_text_held_back_for_a_stop_string(path: Path) -> None:
    tokenizer = Tokenizer.load(path)
    ids = tokenizer.encode("abc", add_special_tokens=False)
    params = SamplingParams(max_tokens=9, stop=("bcd",))
    request = StreamedRequest(1, "one", [1], params, lambda _: None, tokenizer)
    count = len(ids)
    told = StreamedTokens([0] * count, ids, list(range(count)), {1: (0, count)})
    request.advance(told, {}, NOTHING_MORE)
    assert "".join(delta.text for delta in request.take()) != "abc"
    request.advance(StreamedTokens([], [], [], {}), {0: Finished(1, 0, "length", count)}, NOTHING_MORE)
    (last,) = request.take()
    assert "abc".endswith(last.text)
    assert last.text
    assert request.output().outputs[0].text == "abc"


@pytest.mark.parametrize("top", [None, 0, 5])
def test_stream_bounds_unread_tokens_and_keeps_no_read_tokens(path: Path, top: int | None) -> None:
    most, width = 2_000_000, top or 0
    params = SamplingParams(n=2, max_tokens=1 << 20, logprobs=top)
    request = StreamedRequest(1, "one", [1], params, lambda _: None, Tokenizer.load(path))
    request.bound(most)
    progress = replace(
        NOTHING_MORE,
        logprob=np.full(2, -0.5, np.float32),
        top_token=np.full((2, width), 1000, np.int32),
        top_logprob=np.full((2, width), -1.5, np.float32),
    )

    def flooded() -> bool:
        return request.flooded

    def report(token: int) -> None:
        request.advance(StreamedTokens([0, 1], [token, token + 1], [0, 1], {1: (0, 2)}), {}, progress)

    report(1)
    request.take()
    tracemalloc.start()
    try:
        held, kept = [], []
        for _ in range(3):
            before = tracemalloc.get_traced_memory()[0]
            reports = 0
            while not flooded():
                report(1000 + reports)
                reports += 1
            held.append(tracemalloc.get_traced_memory()[0] - before)
            assert sum(len(delta.token_ids) for delta in request.take()) == 2 * reports
            assert not flooded()
            kept.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert all(most / 3 < one < most * 1.05 for one in held), held
    # The free lists of Python keep some thousand tuples of each size, and those of msgspec as many structs.
    assert kept[2] - kept[0] < most / 20 + 2000 * 2 * 80, kept
    request.abort("abort")
    assert [delta.finish_reason for delta in request.take()] == ["abort"] * 2


NOTHING_MORE = Progress(*EMPTY_REPORT, [], Stats())

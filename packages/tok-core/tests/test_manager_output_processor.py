"""The output processor ends samples where a search of their whole output ends them."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from support.schedules import EOS, VOCAB, assert_all_given_back, drive, engine_info, submit
from support.simulated_worker import SimulatedPorts, collect, next_token
from support.stop_search import whole_text_search
from tok_core import EngineConfig, SamplingParams
from tok_core.manager.loop import Manager
from tok_core.manager.stops import StopHit
from tok_core.messages import Int32

# Half of the tokens spell few letters, so that stop strings match often; some have no bytes at all.
PIECES = [
    (b"a", b"b", b"ab", b"ba a", b" ", b" b", b"", b"xyz", b"aab", b"\xc3", b"\xa9b")[i % 11] for i in range(VOCAB - 2)
]
STOP = st.text("ab é", min_size=1, max_size=5)


@st.composite
def params(draw: st.DrawFn) -> SamplingParams:
    longest = draw(st.integers(1, 40))
    return SamplingParams(
        n=draw(st.integers(1, 5)),
        max_tokens=longest,
        min_tokens=min(draw(st.sampled_from([0, 0, 3, 12])), longest),
        stop=tuple(draw(st.lists(STOP, max_size=3))),
        stop_token_ids=tuple(draw(st.lists(st.integers(0, VOCAB - 1), max_size=1))),
        seed=draw(st.integers(0, 9)),
    )


def expected(prompt: list[int], sample: int, params: SamplingParams) -> tuple[list[int], object]:
    """Return a sample's tokens, and its finish reason, its stop, and the number of bytes before the stop."""
    context, pieces = list(prompt), list[bytes]()
    assert params.max_tokens is not None
    for count in range(1, params.max_tokens + 1):
        token = next_token(np.array(context), sample, VOCAB)
        context.append(token)
        pieces.append(PIECES[token] if token < len(PIECES) else b"")
        found = whole_text_search(pieces, params.stop, params.min_tokens)
        if found is not None:
            _, hit = found
            return context[len(prompt) :], ("stop", hit.stop, hit.cut)
        if count > params.min_tokens and (token == EOS or token in params.stop_token_ids):
            return context[len(prompt) :], ("stop", None if token == EOS else token, None)
    return context[len(prompt) :], ("length", None, None)


PROMPT = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9)


@settings(max_examples=40)
@given(st.lists(st.tuples(PROMPT, params()), min_size=1, max_size=6), st.integers(1, 3), st.integers(12, 40))
def test_samples_end_where_a_search_of_their_whole_output_ends(
    asked: list[tuple[list[int], SamplingParams]], run_ahead: int, pages: int
) -> None:
    info = engine_info(num_pages=pages + 2, max_running=6)
    ports = SimulatedPorts(info, delay=run_ahead - 1)
    manager = Manager(EngineConfig(model="simulated", run_ahead=run_ahead), info, ports, PIECES)
    drive(manager, ports, {0: [submit(rid, *one) for rid, one in enumerate(asked)]})
    tokens, ends = collect(ports.reports)
    for rid, (prompt, wanted) in enumerate(asked):
        for sample in range(wanted.n):
            generated, end = expected(prompt, sample, wanted)
            assert tokens[rid, sample] == generated
            told = ends[rid, sample]
            assert (told.reason, told.stop, told.cut) == end
            assert told.tokens == len(generated)
    assert_all_given_back(manager)


def test_stop_strings_are_searched_only_in_samples_they_end() -> None:
    ports = SimulatedPorts(engine_info(), delay=1)
    config = EngineConfig(model="simulated", run_ahead=2)
    manager = Manager(config, engine_info(), ports, [piece or b"c" for piece in PIECES] + [b"d"] * 2)
    find, found = manager.stops.find, list[StopHit | None]()

    def watched(set_id: int, tokens: Int32) -> StopHit | None:
        found.append(find(set_id, tokens))
        return found[-1]

    manager.stops.find = watched  # type: ignore[method-assign]
    params = SamplingParams(n=80, max_tokens=30, seed=0, ignore_eos=True, stop=("b x", "a  b", "xyzb"))
    drive(manager, ports, {0: [submit(0, [1, 2, 3], params)]})
    _, ends = collect(ports.reports)
    stopped = [end for end in ends.values() if isinstance(end.stop, str)]
    assert len(found) == len(stopped) > 5

"""Parts of `tok bench manager`: the simulated worker, the workloads and the profiler."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest

from tok_core import SamplingParams
from tok_core.manager.stops import MAYBE_STRING, StopSets
from tok_core.messages import Cancel, EngineInfo, Progress, Submit
from tok_server.bench.manager.drive import ManagerDriver
from tok_server.bench.manager.load import END, LOADS, VOCABULARY, Load, shared_prompts, vocabulary
from tok_server.bench.manager.profiler import PARTS, TIMED, ManagerProfiler
from tok_server.bench.manager.simulation import LengthSampler, Simulation

INFO = EngineInfo(
    vocab_size=100,
    eos_token_ids=(7,),
    max_model_len=64,
    num_pages=64,
    page_size=4,
    max_running=8,
    max_step_tokens=32,
    device="none",
    dtype="none",
    backend="simulated",
)
EVENLY = np.linspace(0, 1, 10_001)[:-1]


def lives_from_1_to_9(u: np.ndarray) -> np.ndarray:
    return 1 + (u * 9).astype(np.int64)


def lives_from_30_to_38(u: np.ndarray) -> np.ndarray:
    return 29 + lives_from_1_to_9(u)


def work_off(
    requests: list[Submit], info: EngineInfo = INFO, lives: LengthSampler = lives_from_1_to_9
) -> list[Progress]:
    """Run the manager until the requests are done, and return its reports."""
    simulation = Simulation(info, lives)
    report, reports = simulation.ports.report, list[Progress]()

    def heard(progress: Progress) -> None:
        reports.append(progress)
        report(progress)

    simulation.ports.report = heard  # type: ignore[method-assign]
    for request in requests:
        simulation.submit(request)
    for _ in range(10_000):
        simulation.turn()
        if simulation.ports.finished == sum(request.params.n for request in requests):
            return reports
    raise AssertionError("the requests are never done")


def lengths(reports: list[Progress]) -> dict[tuple[int, int], int]:
    ends = [end for report in reports for end in report.finished]
    assert {end.reason for end in ends} == {"stop"}
    return {(end.rid, end.sample): end.tokens for end in ends}


def submit(rid: int, n: int, seed: int) -> Submit:
    prompt = np.arange(10, 20, dtype=np.int32)
    return Submit(rid, prompt, SamplingParams(n=n, max_tokens=40, seed=seed))


def test_simulated_sample_length_does_not_depend_on_other_requests() -> None:
    alone = lengths(work_off([submit(0, 6, seed=5)]))
    assert len(set(alone.values())) > 1
    many = lengths(work_off([submit(1, 3, seed=4), submit(0, 6, seed=5), submit(2, 9, seed=6)]))
    assert {key: many[key] for key in alone} == alone


def test_preempted_simulated_sample_keeps_its_length() -> None:
    requests = [submit(rid, 4, seed=rid) for rid in range(4)]
    wide = lengths(work_off(requests, lives=lives_from_30_to_38))
    simulation = Simulation(msgspec.structs.replace(INFO, num_pages=24), lives_from_30_to_38)
    once = np.ones(64, np.int64)
    # These observations make the length model expect short samples.
    simulation.manager.lengths.observe(0 * once, once, 40 * once, once > 0)
    for request in requests:
        simulation.submit(request)
    while simulation.ports.finished < len(wide):
        simulation.turn()
    assert simulation.manager.stats().preemptions > 0
    assert simulation.manager.stats().output_tokens == sum(wide.values())


def test_simulated_worker_samples_the_eos_id_only_at_the_end() -> None:
    reports = work_off([submit(0, 8, seed=1)])
    drawn = sum(int((report.token == 7).sum()) for report in reports)
    assert drawn == sum(len(report.finished) for report in reports) == 8


@pytest.mark.parametrize(
    ("name", "mean", "least", "most"), [("monkeys", 128, 1, 1300), ("churn", 4.5, 1, 8), ("sharegpt", 185, 5, 1024)]
)
def test_simulated_lengths_follow_the_workloads_distribution(name: str, mean: float, least: int, most: int) -> None:
    lives = LOADS[name](64, ()).output_lengths(EVENLY)
    assert lives.mean() == pytest.approx(mean, rel=0.05)
    assert 1 <= lives.min() <= least
    assert most * 0.8 <= lives.max() <= most


def test_decode_workload_lengths_exceed_any_limit() -> None:
    assert (LOADS["decode"](64, ()).output_lengths(EVENLY) > 1 << 30).all()


@pytest.mark.parametrize("sequences", [1, 256, 1024, 8192, 16_384])
def test_monkeys_workload_fills_its_slots_with_live_prompts_requests(sequences: int) -> None:
    left, prompts = sequences, 0
    for request in LOADS["monkeys"](sequences, ()).requests:
        assert len(request.prompt) == 704
        left -= request.params.n
        prompts += 1
        if left == 0:
            break
    assert left == 0
    assert prompts <= max(1.4 * shared_prompts(sequences), 1)
    assert sequences < 64 or prompts >= 0.6 * shared_prompts(sequences)


def test_admission_prompts_share_only_their_first_halves() -> None:
    prompts = [request.prompt for request in itertools.islice(LOADS["admission"](400, ()).requests, 400)]
    assert {len(prompt) for prompt in prompts} == {1000}
    assert len({prompt[:500].tobytes() for prompt in prompts}) == 64
    assert len({prompt[500:].tobytes() for prompt in prompts}) == 400


def test_stop_string_is_in_every_request_and_flags_few_tokens() -> None:
    for load in (make(64, ("stop",)) for make in LOADS.values()):
        assert next(load.requests).params.stop == ("stop",)
    stops = StopSets(VOCABULARY, (END,), vocabulary())
    set_id = stops.acquire(SamplingParams(stop=("stop",), ignore_eos=True))
    every = np.arange(VOCABULARY, dtype=np.int32)
    flagged = stops.classify(np.full(VOCABULARY, set_id, np.int32), every) == MAYBE_STRING
    assert 0.001 < flagged.mean() < 0.1


def test_regroup_replaces_1_percent_of_sequences_before_every_step() -> None:
    drive = driven("regroup", 300)
    drive.fill(lambda: None)
    before = drive.simulation.manager.stats()
    drive.block(20, lambda: None)
    after = drive.simulation.manager.stats()
    assert drive.running == 300
    assert after.prompt_tokens - before.prompt_tokens == 20 * 3 * 704


def driven(name: str, sequences: int) -> ManagerDriver:
    load: Load = LOADS[name](sequences, ())
    return ManagerDriver(load, Simulation(load.info, load.output_lengths, vocabulary()))


def test_profiling_changes_no_behaviour_and_restores_the_manager() -> None:
    told = []
    for clockwork in (None, ManagerProfiler()):
        drive = driven("churn", 32)
        names = set(vars(drive.simulation.manager))
        told.append(drive.block(60, lambda: None, clockwork))
        assert set(vars(drive.simulation.manager)) == names
        assert "__wrapped__" not in vars(drive.simulation.manager.scheduler.next_step.__func__)  # type: ignore[attr-defined]
    plain, timed = told
    assert plain.tokens == timed.tokens > 0
    # Reports contain elapsed seconds, which have the same encoded size for any value.
    assert plain.sizes == timed.sizes
    assert plain.parts == {}
    assert set(timed.parts) == set(PARTS) == set(TIMED.values())


def test_profiler_excludes_inner_parts_and_counts_recursion_once() -> None:
    now = itertools.count()
    clockwork = ManagerProfiler(lambda: float(next(now)))
    inner = clockwork.timed(lambda: None, "stops")
    again = clockwork.timed(inner, "outputs")
    outer = clockwork.timed(again, "outputs")
    outer()
    # The clock is read when `outputs` begins, when `stops` begins and ends, and when `outputs` ends.
    assert clockwork.seconds == {**dict.fromkeys(PARTS, 0.0), "outputs": 2.0, "stops": 1.0}


def test_profiler_restores_and_counts_a_method_that_raises() -> None:
    drive, clockwork = driven("churn", 4), ManagerProfiler()
    simulation = drive.simulation
    simulation.submit(Cancel(1))
    simulation.ports.submit(b"no message")
    with clockwork.timing(simulation.manager), pytest.raises(msgspec.DecodeError):
        simulation.manager.turn()
    assert "turn" not in vars(simulation.manager)
    assert "requests" not in vars(simulation.ports)
    assert clockwork.seconds["rest"] > 0
    assert clockwork.seconds["messages"] > 0


def test_profiler_raises_when_a_timed_object_is_missing() -> None:
    drive = driven("churn", 4)
    del drive.simulation.manager.lengths
    with pytest.raises(AttributeError, match="lengths"), ManagerProfiler().timing(drive.simulation.manager):
        pass
    assert "turn" not in vars(drive.simulation.manager)

"""Tests of calibration with fake times: choices, the cache on disk, and reasons for left-out candidates."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tok_kernels import AttentionBatch, LayerCache
from tok_kernels import launch_config as config
from tok_kernels.attention.interface import PHASES, AttentionShape, Phase, PhaseKernel
from tok_kernels.attention.reference import attention
from tok_kernels.calibration import Candidate, Choice, cache_directory, calibrate, list_candidates, store, stored_choice
from tok_kernels.calibration.launch_search import LaunchSearch, launch_searches
from tok_kernels.launch_config import AttentionLaunch, LaunchKey
from tok_kernels.measure import TimedWork, Timing
from tok_kernels.measure.steps import AttentionStep

CPU = torch.device("cpu")
SHAPE = AttentionShape(4, 2, 16, 4, 10, torch.float32, torch.float32)
STEPS = (
    AttentionStep(chunks=((5, 0), (3, 4))),
    AttentionStep(chunks=((9, 0),)),
    AttentionStep(rows=3, own=6),
    AttentionStep(rows=4, own=3, groups=2, prefix=9),
)


def plain(q: Tensor, cache: LayerCache, batch: AttentionBatch, scale: float, out: Tensor) -> None:
    out.copy_(attention(q, cache, batch, scale))


def wrong(q: Tensor, cache: LayerCache, batch: AttentionBatch, scale: float, out: Tensor) -> None:
    out.copy_(attention(q, cache, batch, scale) * 1.1)


def missing() -> PhaseKernel:
    raise RuntimeError("nvcc was not found\nand much more")


def everywhere(name: str, kernel: PhaseKernel = plain, planned: bool = False) -> list[Candidate]:
    return [Candidate(phase, name, planned, lambda: kernel) for phase in PHASES]


@dataclass
class Clock:
    """A timer that runs the work once and returns set device, host and plan times by candidate and phase."""

    times: dict[str, tuple[float, float, float]]
    asked: list[str] = field(default_factory=list)

    def __call__(self, work: TimedWork) -> Timing:
        work.plan_and_run()
        work.run()
        self.asked.append(work.name)
        return Timing(*next(times for name, times in self.times.items() if work.name.startswith(name)))


BOTH = [*everywhere("a"), *everywhere("b", planned=True)]
CLOCK = {"a, prefill": (1.0, 9.0, 0.0), "b, prefill": (0.5, 0.1, 0.0), "a": (1.0, 9.0, 0.0), "b": (2.0, 0.1, 0.0)}


def run(directory: Path, clock: Clock, candidates: list[Candidate] = BOTH, **options: bool) -> Choice:
    return calibrate(SHAPE, CPU, candidates, directory=directory, timer=clock, steps=STEPS, searches=(), **options)


def test_calibration_chooses_the_fastest_per_phase_and_reports_all_times(tmp_path: Path) -> None:
    choice = run(tmp_path, Clock(CLOCK))
    assert choice.fastest == {"prefill": "b", "decode": "a", "cascade": "a"}
    assert len(choice.measured) == 2 * len(STEPS)
    costs = {(one.candidate, one.step): one.cost_ms for one in choice.measured}
    # Kernels in a CUDA graph cost the host nothing, and the GEMMs of a prefill hide the host's work.
    assert costs["a", "3 × 6"] == 1.0
    assert costs["a", "1 × 9"] == 1.0
    assert costs["b", "4 × 3, 2 groups × 9"] == 2.0


@pytest.mark.parametrize(("plan_ms", "fastest"), [(0.0, "b"), (4.0, "b"), (6.0, "a")])
def test_calibration_counts_planning_time_that_the_layers_do_not_hide(
    plan_ms: float, fastest: str, tmp_path: Path
) -> None:
    times = {"a": (1.0, 0.1, 0.0), "b": (0.5, 0.2, plan_ms)}  # 10 layers
    choice = run(tmp_path, Clock(times))
    assert choice.fastest == {"prefill": "b", "decode": fastest, "cascade": fastest}


@pytest.mark.parametrize(("device_ms", "fastest"), [(0.96, "a"), (0.94, "b")])
def test_calibration_leaves_the_first_candidate_only_for_a_clear_gain(
    device_ms: float, fastest: str, tmp_path: Path
) -> None:
    times = {"a": (1.0, 0.1, 0.0), "b": (device_ms, 0.1, 0.0)}
    assert set(run(tmp_path, Clock(times)).fastest.values()) == {fastest}


@pytest.mark.parametrize(("device_ms", "fastest"), [(0.55, "b"), (0.45, "a")])
def test_decode_outside_cuda_graphs_costs_the_launches_of_its_layer(
    device_ms: float, fastest: str, tmp_path: Path
) -> None:
    times = {"a": (device_ms, 9.0, 0.0), "b": (0.4, 0.2, 0.0)}
    assert run(tmp_path, Clock(times)).fastest["decode"] == fastest


def test_calibration_weighs_steps_equally_whatever_their_size(tmp_path: Path) -> None:
    times = {
        "a, prefill 1 ×": (100.0, 0.0, 0.0),
        "a": (1.0, 0.0, 0.0),
        "b, prefill 1 ×": (90.0, 0.0, 0.0),
        "b": (2.0, 0.0, 0.0),
    }
    assert run(tmp_path, Clock(times)).fastest["prefill"] == "a"


def test_calibration_takes_the_first_of_equal_candidates(tmp_path: Path) -> None:
    assert set(run(tmp_path, Clock({"a": (1.0, 0.1, 0.0), "b": (1.0, 0.1, 0.0)})).fastest.values()) == {"a"}


def test_a_cached_calibration_is_not_measured_again(tmp_path: Path) -> None:
    assert stored_choice(SHAPE, CPU, BOTH, tmp_path) is None
    first = run(tmp_path, Clock(CLOCK))
    later = Clock({})
    assert run(tmp_path, later) == first == stored_choice(SHAPE, CPU, BOTH, tmp_path)
    assert later.asked == []
    faster = Clock({"a": (0.1, 0.1, 0.0), "b": (2.0, 0.1, 0.0)})
    assert run(tmp_path, faster, remeasure=True) != first
    assert set(run(tmp_path, Clock({})).fastest.values()) == {"a"}


def test_another_shape_or_candidate_list_is_calibrated_separately(tmp_path: Path) -> None:
    run(tmp_path, Clock(CLOCK))
    assert stored_choice(replace(SHAPE, layers=11), CPU, BOTH, tmp_path) is None
    assert stored_choice(SHAPE, CPU, BOTH[:3], tmp_path) is None
    assert set(run(tmp_path, Clock(CLOCK), BOTH[:3]).fastest.values()) == {"a"}
    assert len(list(tmp_path.iterdir())) == 2


def edit(change: Callable[[dict[str, dict[str, object]]], object]) -> Callable[[bytes], bytes]:
    def edited(content: bytes) -> bytes:
        values = json.loads(content)
        change(values)
        return json.dumps(values).encode()

    return edited


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut": lambda content: content[: len(content) // 2],
    "no text": lambda _: b"\xff\xfe\x00",
    "a list": lambda _: b"[]",
    "other versions": edit(lambda values: values["key"].update(versions={})),
    "no choice": edit(lambda values: values.pop("choice")),
    "an unknown phase": edit(lambda values: values["choice"].update(fastest={"sleep": "a"})),
    "a candidate that is none": edit(lambda values: values["choice"].update(fastest=dict.fromkeys(PHASES, "c"))),
    "times that are no numbers": edit(
        lambda values: values["choice"].update(measured=[{"timing": {"device_ms": "x"}}])
    ),
    "an impossible launch": edit(lambda values: values["choice"].update(launches=[["tile", 64, 2, {"rows": -1}]])),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_or_outdated_calibration_file_is_replaced(damage: str, tmp_path: Path) -> None:
    first = run(tmp_path, Clock(CLOCK))
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(DAMAGE[damage](whole))
    clock = Clock(CLOCK)
    assert run(tmp_path, clock) == first
    assert clock.asked
    assert file.read_bytes() == whole


def test_concurrent_calibration_writes_leave_one_whole_file(tmp_path: Path) -> None:
    choice, key = run(tmp_path / "one", Clock(CLOCK)), store.choice_key(SHAPE, CPU, BOTH)
    there = tmp_path / "many"
    store.write(there, key, choice)

    def write_and_read(_: int) -> Choice | None:
        store.write(there, key, choice)
        return store.read(there, key)

    with ThreadPoolExecutor(8) as pool:
        assert all(found == choice for found in pool.map(write_and_read, range(200)))
    assert len(list(there.iterdir())) == 1


def test_an_unwritable_cache_directory_is_logged_and_still_calibrates(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert run(tmp_path / "file" / "below", Clock(CLOCK)).fastest["decode"] == "a"
    assert "cannot store the calibration" in caplog.text


def test_broken_and_wrong_candidates_are_rejected_with_the_reason(
    tmp_path: Path,
) -> None:
    odd = [*everywhere("a"), *everywhere("b", wrong), Candidate("decode", "c", True, missing)]
    choice = run(tmp_path, Clock({"a": (9.0, 9.0, 9.0), "b": (1.0, 0.0, 0.0)}), odd)
    assert set(choice.fastest.values()) == {"a"}
    assert choice.rejected["decode c"] == "RuntimeError: nvcc was not found"
    assert choice.rejected["prefill b"].startswith("ArithmeticError: results differ by 0.1 from those of the first")
    assert stored_choice(SHAPE, CPU, odd, tmp_path) == choice


def test_a_phase_without_a_working_kernel_is_an_error_with_reasons(tmp_path: Path) -> None:
    candidates = [*everywhere("a")[:1], Candidate("decode", "c", True, missing)]
    with pytest.raises(ValueError, match=r"no kernel computes decode here \(decode c: RuntimeError: nvcc was not"):
        run(tmp_path, Clock(CLOCK), candidates)


def test_calibrations_are_kept_in_the_cache_directory_of_the_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "tok" / "kernels"
    run_here = calibrate(SHAPE, CPU, BOTH, timer=Clock(CLOCK), steps=STEPS, searches=())
    assert stored_choice(SHAPE, CPU, BOTH) == run_here
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "tok" / "kernels"


KERNEL = LaunchKey("decode", 16, 4)
LAUNCHES = (AttentionLaunch(16, 32, 2, 2, 8), AttentionLaunch(16, 16, 4, 3, 8), AttentionLaunch(16, 64, 1, 1, 8))


def by_launch(work: TimedWork) -> Timing:
    if not work.name.startswith("launch of decode"):
        return Timing(1.0, 0.0, 0.0)
    warps = config.decode_launch(16, 2, torch.float32, torch.float32).warps
    if warps == 1:
        raise RuntimeError("out of resources")
    return Timing(1.0 / warps, 0.0, 0.0)


def test_tuned_launches_are_stored_and_used_from_then_on(tmp_path: Path) -> None:
    search = LaunchSearch(KERNEL, LAUNCHES, STEPS[2:3])
    of_table = config.decode_launch(16, 2, torch.float32, torch.float32)
    try:
        for timer in (by_launch, Clock({})):  # measured, then known
            choice = calibrate(SHAPE, CPU, BOTH, directory=tmp_path, timer=timer, steps=STEPS, searches=(search,))
            assert choice.launches == {KERNEL: LAUNCHES[1]}
            assert config.decode_launch(16, 2, torch.float32, torch.float32) == LAUNCHES[1]
            config.remove_override(KERNEL)
            assert config.decode_launch(16, 2, torch.float32, torch.float32) == of_table
    finally:
        config.remove_override(KERNEL)


def test_a_launch_search_without_a_working_launch_is_an_error(tmp_path: Path) -> None:
    search = LaunchSearch(KERNEL, LAUNCHES[2:], STEPS[2:3])
    with pytest.raises(ValueError, match="no launch configuration of Triton's decode kernel works on this device"):
        calibrate(SHAPE, CPU, BOTH, directory=tmp_path, timer=by_launch, steps=STEPS, searches=(search,))
    assert config.decode_launch(16, 2, torch.float32, torch.float32) != LAUNCHES[2]


@pytest.mark.parametrize("size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_launch_alternatives_begin_with_the_table_entry_and_are_distinct(size: int, dtype: torch.dtype) -> None:
    for name, of_table in (
        ("decode", replace(config.decode_launch(size, 1, dtype, dtype), rows=16)),
        ("split", replace(config.decode_launch(size, 1, dtype, dtype, split=True), rows=16)),
        ("tile", config.tile_launch(size, dtype)),
    ):
        found = config.alternatives(LaunchKey(name, size, dtype.itemsize))  # type: ignore[arg-type]
        assert found[0] == of_table
        assert 3 < len(found) == len(set(found)) < 8


@pytest.mark.parametrize(
    ("card", "searched"),
    [
        ("NVIDIA H200", False),
        ("NVIDIA H100 80GB HBM3", False),
        ("NVIDIA H100 PCIe", True),
        ("NVIDIA H100 NVL", True),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", True),
        ("NVIDIA GH200 480GB", True),
    ],
)
def test_launches_are_searched_on_cards_without_measured_ones(
    card: str, searched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: card)
    assert bool(launch_searches(SHAPE, torch.device("cuda"))) == searched


def test_launches_of_a_card_replace_those_of_the_table() -> None:
    of_table = config.decode_launch(64, 1, torch.bfloat16, torch.bfloat16)
    try:
        config.override_for_card("NVIDIA H100 80GB HBM3")
        assert config.decode_launch(64, 1, torch.bfloat16, torch.bfloat16).warps == 4
        assert config.decode_launch(128, 1, torch.bfloat16, torch.bfloat16).warps == of_table.warps == 1
    finally:
        for kernel in config.card_launches("NVIDIA H100 80GB HBM3") or ():
            config.remove_override(kernel)
    assert config.decode_launch(64, 1, torch.bfloat16, torch.bfloat16) == of_table


def test_calibration_on_a_cpu_has_only_triton_and_no_launch_search() -> None:
    assert launch_searches(SHAPE, CPU) == []
    found, rejected = list_candidates(SHAPE, CPU)
    phases: list[Phase] = [one.phase for one in found]
    assert {one.name for one in found} == {"triton"}
    assert sorted(phases) == sorted(PHASES)
    assert rejected == {"flashinfer": "FlashInfer does not run on cpu"}
    assert list_candidates(SHAPE, CPU, "flashinfer")[0] == []


@pytest.mark.parametrize("field", ["heads", "kv_heads", "head_dim", "page_size", "layers"])
def test_an_attention_shape_is_validated_by_name(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is 0; allowed: integers from 1"):
        replace(SHAPE, **{field: 0})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"heads is 4; allowed: multiples of kv_heads \(3\)"):
        replace(SHAPE, kv_heads=3)

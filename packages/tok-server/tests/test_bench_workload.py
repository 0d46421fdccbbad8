"""Workload files: how they are read, how their errors are reported, and timelines of runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tok_core import InvalidField
from tok_server.bench.workloads.timeline import timeline, timeline_of_requests
from tok_server.bench.workloads.workload import (
    HIGH,
    LOW,
    WorkloadError,
    WorkloadRequest,
    random_ids,
    read_workload,
    warm_up_requests,
)

LINES = """{"meta": {"name": "mine", "temperature": 0.5, "top_p": 0.9}}
{"i": 0, "ids": [1, 2, 3], "text": "abc", "n": 4, "max_tokens": 64}

{"i": 1, "rand": [7, 2], "max_tokens": 5, "ignore_eos": true}
"""


def written(tmp_path: Path, text: str) -> Path:
    (file := tmp_path / "mine.jsonl").write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("seed", "ids"),
    [
        (0, [12503, 38800, 73739, 12656]),
        (7, [70916]),
        (1_000_000, [10457, 108506, 64312, 124107, 19668]),
        (2_000_001, [13758, 9218, 59811, 102722, 99689]),
        (2**32 + 5, [11372, 81233, 14629, 123884, 49270]),
    ],
)
def test_random_ids_of_a_seed_are_fixed(seed: int, ids: list[int]) -> None:
    assert random_ids(seed, len(ids)) == ids


def test_random_ids_of_a_long_prompt_have_the_recorded_checksum() -> None:
    ids = random_ids(123_456_789, 4096)
    assert (sum(ids), ids[-1]) == (258_388_205, 21_779)
    assert LOW <= min(ids) < max(ids) < HIGH


def test_read_workload_parses_meta_ids_and_random_prompts(tmp_path: Path) -> None:
    found = read_workload(str(written(tmp_path, LINES)))
    assert (found.name, found.temperature, found.top_p) == ("mine", 0.5, 0.9)
    assert found.requests == [
        WorkloadRequest([1, 2, 3], 4, 64, ignore_eos=False),
        WorkloadRequest(random_ids(7, 2), 1, 5, ignore_eos=True),
    ]
    assert found.max_sequence_tokens == 67


def test_limit_n_and_max_tokens_change_every_request(tmp_path: Path) -> None:
    file = str(written(tmp_path, LINES))
    assert read_workload(file, limit=1).requests == [WorkloadRequest([1, 2, 3], 4, 64, ignore_eos=False)]
    changed = read_workload(file, n=2, max_tokens=9).requests
    assert [(one.n, one.max_tokens) for one in changed] == [(2, 9), (2, 5)]


def test_workload_name_is_looked_up_in_workload_dir(tmp_path: Path) -> None:
    written(tmp_path, LINES).rename(tmp_path / "decode.jsonl")
    assert read_workload("decode", tmp_path).name == "mine"


def test_workload_without_meta_is_named_after_its_file(tmp_path: Path) -> None:
    found = read_workload(str(written(tmp_path, LINES.split("\n", 1)[1])))
    assert (found.name, found.temperature, found.top_p) == ("mine", 1.0, 1.0)


@pytest.mark.parametrize(
    ("source", "directory", "told"),
    [
        ("monkeys", None, r"workload_dir is None; allowed: a directory with monkeys\.jsonl \(it is not part"),
        ("sharegpt", Path("/no/such"), r"workload_dir is '/no/such'; allowed: a directory with sharegpt\.jsonl"),
        ("nonsense", None, "workload is 'nonsense'; allowed: monkeys, sharegpt, decode or a JSONL file"),
    ],
)
def test_missing_workload_raises_invalid_field_naming_the_flag(source: str, directory: Path | None, told: str) -> None:
    with pytest.raises(InvalidField, match=told):
        read_workload(source, directory)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"ids": [1], "max_tokens": 0}', "max_tokens is 0; allowed: integers from 1"),
        ('{"ids": [1]}', "max_tokens is None; allowed: integers from 1"),
        ('{"ids": [-1], "max_tokens": 1}', r"ids is \[-1\]; allowed: a list of integers from 0, not empty"),
        ('{"ids": [], "max_tokens": 1}', r"ids is \[\]; allowed"),
        ('{"ids": "abc", "max_tokens": 1}', "ids is 'abc'; allowed"),
        ('{"max_tokens": 1}', r"ids is None; allowed: .*; or rand: \[seed, length\]"),
        ('{"rand": [1, 0], "max_tokens": 1}', r"rand is \[1, 0\]; allowed: \[seed, length\]"),
        ('{"rand": [1], "max_tokens": 1}', r"rand is \[1\]; allowed"),
        ('{"ids": [1], "max_tokens": 1, "n": 1.5}', r"n is 1\.5; allowed: integers from 1"),
        ('{"ids": [1], "max_tokens": 1, "ignore_eos": 1}', "ignore_eos is 1; allowed: true or false"),
        ('{"meta": {"top_p": 0}}', "meta is {'top_p': 0}; allowed: .*top_p above 0"),
        ("[]", "is not a JSON object"),
        ("{", "not JSON"),
    ],
)
def test_invalid_workload_line_is_reported_with_field_and_value(line: str, told: str, tmp_path: Path) -> None:
    file = written(tmp_path, LINES + line)
    with pytest.raises(WorkloadError, match=rf"mine\.jsonl, line 5: {told}"):
        read_workload(str(file))


def test_workload_without_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="has no requests"):
        read_workload(str(written(tmp_path, '{"meta": {}}')))


def test_warm_up_prompts_share_no_prefix_with_the_run() -> None:
    requests = [WorkloadRequest([1, 2, 3], 4, 64, ignore_eos=False), WorkloadRequest([4, 5], 4, 8, ignore_eos=True)] * 2
    assert warm_up_requests(requests, sequences=6, max_tokens=16) == [
        WorkloadRequest([3, 2, 1], 4, 16, ignore_eos=False),
        WorkloadRequest([5, 4], 2, 8, ignore_eos=True),
    ]


def test_timeline_spreads_tokens_between_observations() -> None:
    moments = [(0.0, 0, 0), (1.0, 100, 4), (2.5, 100, 4), (5.0, 600, 2)]
    found = timeline(moments, 5.0)
    assert found.seconds[0] == pytest.approx(0.125)
    assert len(found.seconds) == len(found.output_tok_s) == len(found.sequences_running) == 20
    assert sum(found.output_tok_s) * 0.25 == pytest.approx(600)
    assert found.output_tok_s[:4] == [100.0] * 4
    assert found.output_tok_s[-1] == 200.0
    assert found.sequences_running[5:9] == [4.0] * 4


def test_timeline_of_requests_spreads_tokens_from_first_token_to_end() -> None:
    found = timeline_of_requests([0, 1], [0, 2], [2, 4], [200, 40], [3, 1], 4.0)
    assert sum(found.output_tok_s) * 4.0 / len(found.seconds) == pytest.approx(240, rel=1e-3)
    at = np.array(found.seconds)
    assert np.array(found.output_tok_s)[at < 1.9] == pytest.approx(100, abs=0.2)
    assert np.array(found.output_tok_s)[at > 2.1] == pytest.approx(20, abs=0.2)
    assert np.array(found.sequences_running)[(at > 1.1) & (at < 1.9)] == pytest.approx(4)

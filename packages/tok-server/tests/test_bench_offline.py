"""`tok bench offline` on a tiny model: the figures agree with the engine, the output with the flags."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from support.engines import cpu_engine, manager_of
from support.grouping import group_eagerly
from support.tiny_models import make_model
from tok_core import Engine, EngineConfig, InvalidField
from tok_core.config import TRACE_WARM_UP
from tok_core.text import load_text
from tok_server.bench.gpu import first_visible
from tok_server.bench.tracing import tracing
from tok_server.bench.watch import throttled
from tok_server.bench.workloads import offline
from tok_server.bench.workloads.counters import REQUIRED_COUNTERS, with_counters
from tok_server.bench.workloads.offline import measure, tail_speed, warm_up, without_tokenizer
from tok_server.bench.workloads.plot import plot_results
from tok_server.bench.workloads.result import Result, Timeline, percentile, table
from tok_server.bench.workloads.timeline import timeline
from tok_server.bench.workloads.workload import Workload, WorkloadRequest
from tok_server.cli import main as tok
from tok_server.cli import make_parser
from tok_server.commands.bench import _config
from tok_server.flags.engine_flags import ENGINE_FLAGS

pytestmark = pytest.mark.usefixtures("forked_children")

SHARED = list(range(10, 58))
WORKLOAD = Workload(
    "mixed",
    0.8,
    1.0,
    [
        WorkloadRequest([*SHARED, 1], 4, 24, ignore_eos=True),
        WorkloadRequest([*SHARED, 2], 4, 20, ignore_eos=True),
        WorkloadRequest([60, 61, 62], 1, 1, ignore_eos=False),
    ],
)
SLOTS = 9  # enough for all samples: a sample that waited for half a second would take another's slot
LINES = f'{{"ids": {list(range(40))}, "n": 2, "max_tokens": 6, "ignore_eos": true}}\n'

RIVALS_KEYS = {
    "engine", "mode", "workload", "rep", "prompts", "sequences", "prompt_tokens", "output_tokens", "seconds",
    "output_tok_s", "total_tok_s", "mean_out", "finished_by_stop", "errors", "gpu", "peak_gpu_mem_gib",
    "latency_p50_s", "latency_p99_s", "concurrency", "model",
}  # fmt: skip


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    with cpu_engine(tiny_model, max_running=SLOTS) as engine:
        group_eagerly(manager_of(engine))
        yield engine


@pytest.fixture(scope="module")
def result(engine: Engine) -> Result:
    warm_up(engine, WORKLOAD)
    return measure(engine, "tiny", WORKLOAD, 0)


def test_result_counts_equal_those_of_the_workload(result: Result) -> None:
    assert (result.engine, result.mode, result.workload, result.model) == ("tok", "offline", "mixed", "tiny")
    assert (result.prompts, result.sequences, result.prompt_tokens) == (3, 9, 49 + 49 + 3)
    assert result.output_tokens == 4 * 24 + 4 * 20 + 1
    assert result.mean_out == round(177 / 9, 2)
    assert (result.errors, result.preemptions, result.gpu) == (0, 0, None)
    assert (result.tp_few_tokens, result.tp_async_tokens) == (None, None)
    assert result.concurrency == SLOTS
    assert result.steps is not None
    assert 24 <= result.steps < 80


def test_result_rates_and_times_are_consistent(result: Result) -> None:
    assert result.output_tok_s == pytest.approx(177 / result.seconds, rel=0.05)
    assert result.total_tok_s == pytest.approx((177 + 101) / result.seconds, rel=0.05)
    assert result.ttft_p50_s is not None
    assert result.ttft_p99_s is not None
    assert result.latency_p50_s is not None
    assert result.latency_p99_s is not None
    assert 0 < result.ttft_p50_s <= result.ttft_p99_s <= result.latency_p99_s <= result.seconds + 1e-3
    assert result.per_token_p50_ms is not None
    assert 0 < result.per_token_p50_ms <= result.seconds * 1000 / 19


def test_prefix_hits_come_from_the_run_and_not_from_the_warm_up(engine: Engine, result: Result) -> None:
    assert result.prefix_hit_share is not None
    assert result.prefix_hit_share <= round(48 / 101, 4)
    again = measure(engine, "tiny", WORKLOAD, 1)
    assert again.prefix_hit_share == round((48 + 48) / 101, 4)
    assert again.group_rows_share is not None
    assert 0.5 < again.group_rows_share <= 1


def test_step_time_parts_fit_into_the_time_of_the_run(result: Result) -> None:
    assert result.steps is not None
    parts = (result.schedule_ms, result.launch_ms, result.device_ms, result.output_ms)
    assert all(part is not None and part > 0 for part in parts)
    assert result.gpu_busy_share is not None
    assert result.device_ms is not None
    assert result.gpu_busy_share == pytest.approx(result.device_ms * result.steps / 1e3 / result.seconds, rel=0.05)
    assert result.schedule_ms is not None
    assert result.output_ms is not None
    # Here one thread does all: a step is launched and computed when the manager sends it.
    assert (max(result.schedule_ms, result.device_ms) + result.output_ms) * result.steps <= result.seconds * 1e3 * 1.05


def test_computed_tokens_are_uncached_prompt_tokens_plus_outputs(engine: Engine) -> None:
    prompt = list(range(200, 250))
    workload = Workload("one", 0.0, 1.0, [WorkloadRequest(prompt, 1, 8, ignore_eos=True)])
    new = measure(engine, "tiny", workload, 0)
    known = measure(engine, "tiny", workload, 1)
    assert new.discarded_tokens is not None
    # The last sampled token is fed to no step, except those that had been scheduled by then.
    assert new.computed_tokens == 50 + 7 + new.discarded_tokens
    assert known.discarded_tokens is not None
    assert known.computed_tokens == 50 - 48 + 7 + known.discarded_tokens


def test_gpu_busy_share_is_at_most_1(result: Result) -> None:
    before = dict.fromkeys(REQUIRED_COUNTERS, 0.0)
    after = before | {"steps": 4.0, "device_seconds": 1.5 * result.seconds}
    assert with_counters(result, before, after).gpu_busy_share == 1


def test_timeline_has_all_tokens(result: Result) -> None:
    spans = result.timeline
    assert sum(spans.output_tok_s) * result.seconds / len(spans.seconds) == pytest.approx(177, rel=0.05)
    assert 0 <= min(spans.sequences_running) <= max(spans.sequences_running) <= SLOTS
    assert spans.device_busy is not None
    assert len(spans.device_busy) == len(spans.seconds)
    assert 0 < max(spans.device_busy) <= 1
    assert spans.computed_tok_s is not None
    assert result.computed_tokens is not None
    computed = sum(spans.computed_tok_s) * result.seconds / len(spans.seconds)
    assert computed == pytest.approx(result.computed_tokens, rel=0.05)


def test_timeline_spreads_tokens_over_steps_and_keeps_pauses() -> None:
    # Steps of 0.1 s end at 0.1, 0.2, … and bring 100 tokens each; none for the third second. Observed every 0.03 s.
    at = np.arange(0.0, 4.03, 0.03)
    done = np.floor(np.minimum(at, 2.0) / 0.1 + 1e-9) + np.floor(np.maximum(at - 3.0, 0.0) / 0.1 + 1e-9)
    spans = timeline(np.column_stack((at, 100 * done, np.full(len(at), 5), 0.09 * done, 150 * done)), 4.0)
    seconds, rate = np.array(spans.seconds), np.array(spans.output_tok_s)
    busy = np.array(spans.device_busy)
    steady = (seconds < 1.8) | (seconds > 3.5)
    assert np.abs(rate[steady] - 1000).max() < 130
    assert np.abs(busy[steady] - 0.9).max() < 0.12
    assert np.array(spans.computed_tok_s) == pytest.approx(1.5 * rate, abs=0.2)
    assert rate[(seconds > 2.3) & (seconds < 2.9)].max() == 0
    assert rate.sum() * 4.0 / len(rate) == pytest.approx(3000, rel=0.01)


def test_seldom_acts_at_once_and_then_only_when_due() -> None:
    now, done = [5.0], []
    act = throttled(lambda: done.append(now[0]), 2.0, lambda: now[0])
    for moment in (5.0, 5.5, 6.9, 7.0, 8.0, 20.0, 21.0, 22.0):
        now[0] = moment
        act()
    assert done == [5.0, 7.0, 20.0, 22.0]


def test_json_result_is_one_line_with_the_keys_of_other_engines_first(result: Result) -> None:
    line = msgspec.json.encode(result).decode()
    assert "\n" not in line
    assert set(list(json.loads(line))[: len(RIVALS_KEYS)]) == RIVALS_KEYS


def test_result_table_has_a_column_for_each_repetition(result: Result) -> None:
    lines = table([result, result]).splitlines()
    assert lines[0] == "mixed on tiny, offline, tok"
    assert f"  {'output tokens':<24}{177:>14}{177:>14}" in lines
    assert not any("GPU" in line for line in lines)


def test_plot_is_a_png_of_the_documented_size(result: Result, tmp_path: Path) -> None:
    plot_results([result, result], tmp_path / "plot.png")
    header = (tmp_path / "plot.png").read_bytes()[:24]
    assert header.startswith(b"\x89PNG\r\n\x1a\n")
    assert (int.from_bytes(header[16:20]), int.from_bytes(header[20:24])) == (1200, 975)
    bare = msgspec.structs.replace(result, timeline=Timeline([1.0, 2.0], [3.0, 4.0], [5.0, 5.0]))
    plot_results([bare], tmp_path / "plot.png")
    header = (tmp_path / "plot.png").read_bytes()[:24]
    assert (int.from_bytes(header[16:20]), int.from_bytes(header[20:24])) == (1200, 825)
    with pytest.raises(ValueError, match="results is empty"):
        plot_results([], tmp_path / "none.png")


def test_percentiles_are_values_of_the_input() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile(values, 1.0)) == (51.0, 100.0, 100.0)
    assert percentile([0.0123456], 0.5, 1e3) == 12.3456
    assert percentile([], 0.5) is None


def test_first_visible_gpu_follows_cuda_visible_devices() -> None:
    assert [first_visible(one) for one in (None, "3,1", "GPU-a1", "-1", "")] == ["0", "3", "GPU-a1", None, None]


def test_without_tokenizer_keeps_weights_and_configs(tiny_model: Path) -> None:
    with without_tokenizer(str(tiny_model), None) as view:
        names = {file.name for file in Path(view).iterdir()}
        assert names == {"config.json", "generation_config.json", "model.safetensors"}
        assert Path(view).name == tiny_model.name
        assert (Path(view) / "model.safetensors").stat().st_size == (tiny_model / "model.safetensors").stat().st_size
    assert not Path(view).exists()


def test_without_tokenizer_logs_other_warnings_of_the_engine(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = logging.getLogger("tok_core")
    with without_tokenizer(str(tiny_model), None) as view:
        assert load_text(Path(view)) == (None, None)
        log.warning("the launch of step %d took the host %d ms", 7, 200)
    assert [record.getMessage() for record in caplog.records] == ["the launch of step 7 took the host 200 ms"]
    load_text(tiny_model.parent)
    assert caplog.records[-1].getMessage().startswith("token ids only")


def test_bench_offline_has_the_engine_flags_and_passes_them_on(tiny_model: Path) -> None:
    parser = make_parser(["bench"])
    words = ["bench", "offline", "--workload", "w", "--model", str(tiny_model)]
    plain = _config(parser.parse_args(words), WORKLOAD)
    assert plain == EngineConfig(model=str(tiny_model), max_model_len=49 + 24, generation_config="none")
    given = ["--no-prefix-groups", "--load-format", "dummy", "--eos-probability", "0.25", "--max-model-len", "90"]
    asked = _config(parser.parse_args([*words, *given]), WORKLOAD)
    assert (asked.prefix_groups, asked.eos_probability, asked.eos_temperature) == (False, 0.25, 0.8)
    assert (asked.load_format, asked.max_model_len) == ("dummy", 90)
    assert set(ENGINE_FLAGS) - {"generation_config"} <= vars(parser.parse_args(words)).keys()


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each engine that the command starts: whether the engine detokenizes."""
    seen: list[bool] = []

    class Seen(Engine):
        def __init__(self, config: EngineConfig) -> None:
            super().__init__(config)
            seen.append(self.tokenizer is not None)

    monkeypatch.setattr(offline, "Engine", Seen)
    return seen


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """A small workload on a model directory without weights."""
    model = make_model("llama", tmp_path / "shape", layers=1)
    (model / "model.safetensors").unlink()
    (file := tmp_path / "w.jsonl").write_text(LINES)
    flags = ["--load-format", "dummy", "--eos-probability", "0.5", "--device", "cpu", "--kv-cache-tokens", "1024"]
    return ["bench", "offline", "--workload", str(file), "--model", str(model), "--json", *flags]


def test_keep_engine_finds_cached_prompts_in_the_second_repetition(
    words: list[str], texts: list[bool], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tok([*words, "--keep-engine", "--plot", str(tmp_path / "plot.png")]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (first["rep"], first["prefix_hit_share"], second["rep"], second["prefix_hit_share"]) == (0, 0.0, 1, 0.8)
    assert (first["output_tokens"], first["model"], first["prefix_groups"]) == (12, "shape", True)
    assert first["startup_s"] == second["startup_s"] > 0
    assert (tmp_path / "plot.png").is_file()
    assert texts == [False]


def test_drafts_of_a_markov_language_are_counted(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--markov-probability", "0.97", "--eos-probability", "0.001", "--speculate", "8", "--max-tokens", "200"]
    (file := Path(words[3])).write_text('{"ids": [5, 6, 7], "n": 8, "max_tokens": 200}\n')
    assert file.is_file()
    for more in ([], ["--speculate", "off"]):
        assert tok([*words, *flags, *more, "--reps", "1"]) == 0
    drafted, plain = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert drafted["output_tokens"] == plain["output_tokens"]
    assert drafted["steps"] < plain["steps"] * 0.8
    assert drafted["drafted_tokens"] > drafted["accepted_tokens"] > drafted["draft_steps"] > 0
    assert plain["drafted_tokens"] is plain["accepted_tokens"] is None


def test_drafts_of_a_model_are_counted(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The draft model has a layer of the model's eight, and so speaks the same Markov language."""
    config = json.loads((file := Path(words[words.index("--model") + 1]) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    file.write_text(json.dumps({**config, "num_hidden_layers": 8}))
    flags = ["--markov-probability", "0.97", "--eos-probability", "0.001", "--speculate", "4", "--max-tokens", "50"]
    flags += ["--draft", str(tmp_path)]
    assert tok([*words, *flags, "--reps", "1"]) == 0
    drafted = json.loads(capsys.readouterr().out.splitlines()[0])
    assert drafted["model_drafted_tokens"] >= drafted["model_accepted_tokens"] > 3


def test_tail_begins_when_a_quarter_of_the_samples_is_left() -> None:
    rows = [(0.0, 0, 0), (0.5, 0, 4), (1.0, 40, 1), (2.0, 50, 1), (3.0, 60, 0)]
    assert tail_speed(rows, samples=4) == 10
    assert tail_speed(rows[:2], samples=4) is None


def test_each_repetition_starts_with_an_empty_cache_by_default(
    words: list[str], texts: list[bool], capsys: pytest.CaptureFixture[str]
) -> None:
    assert tok([*words, "--text", "--no-prefix-groups"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["rep"], line["prefix_hit_share"]) for line in lines] == [(0, 0.0), (1, 0.0)]
    assert [(line["prefix_groups"], line["group_rows_share"]) for line in lines] == [(False, 0.0)] * 2
    assert texts == [True, True]


def test_trace_is_taken_of_an_extra_run_and_summarized(
    words: list[str], texts: list[bool], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.json"
    words[words.index("--workload") + 1] = str(long := tmp_path / "long.jsonl")
    long.write_text('{"ids": [1, 2], "max_tokens": 60, "ignore_eos": true}\n')
    assert tok([*words, "--reps", "1", "--trace", str(file), "--trace-steps", "6"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["output_tokens"] == 60
    assert re.search(r"^6 steps traced in .*trace\.json, [\d.]+ ms: [\d.]+% busy, [\d.]+% idle in ", printed.err, re.M)
    names = [event.get("name") for event in json.loads(file.read_text())["traceEvents"]]
    assert names.count("aten::embedding") == 6
    assert len(texts) == 1  # the engine of the measured run: the traced run gives no result


@pytest.mark.parametrize("shared", ["--tp", "--pp"])
def test_every_worker_writes_a_trace_and_is_summarized(
    shared: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, other = tmp_path / "t.json", tmp_path / ("t.stage0.rank1.json" if shared == "--tp" else "t.stage0.rank0.json")
    other.write_text("of an earlier run")
    words[words.index("--model") + 1] = str(make_model("llama", tmp_path / "two"))
    words[words.index("--workload") + 1] = str(long := tmp_path / "long.jsonl")
    long.write_text('{"ids": [1, 2], "max_tokens": 60, "ignore_eos": true}\n')
    assert tok([*words, shared, "2", "--reps", "1", "--trace", str(file), "--trace-steps", "6"]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert (result["tp_few_tokens"], result["tp_async_tokens"]) == ((64, None) if shared == "--tp" else (None, None))
    told = re.findall(r"^stage (\d), rank (\d): 6 steps traced in (.*), [\d.]+ ms: ", printed.err, re.M)
    places = [("0", "0", file), ("0", "1", other)] if shared == "--tp" else [("0", "0", other), ("1", "0", file)]
    assert told == [(stage, rank, str(of_one)) for stage, rank, of_one in places]
    traced = [json.loads(one.read_text())["traceEvents"] for one in (file, other)]
    products = [[event.get("name") for event in events].count("aten::linear") for events in traced]
    assert all(count and count % 6 == 0 for count in products)


def test_the_steps_traced_are_in_the_middle_of_the_run(tmp_path: Path) -> None:
    config = tracing(EngineConfig(model="m"), tmp_path / "t.json", 20, 400)
    assert (config.trace, config.trace_from, config.trace_steps) == (str(tmp_path / "t.json"), 190, 20)
    assert tracing(config, tmp_path / "t.json", 5, 20).trace_from == TRACE_WARM_UP + 1
    for steps, of, most in ((6, 20, 5), (1, 3, 0)):
        with pytest.raises(
            InvalidField, match=f"trace_steps is {steps}; allowed: at most {most}, because the run takes"
        ):
            tracing(config, tmp_path / "t.json", steps, of)


WORKLOAD_FLAGS = {
    "--workload", "--workload-dir", "--limit", "--n", "--max-tokens", "--temperature", "--top-p", "--reps", "--json",
    "--plot", "--model",
}  # fmt: skip


def test_bench_offline_and_serve_have_exactly_the_listed_flags() -> None:
    bench = make_parser(["bench"])
    for kind, own in (
        ("offline", {"--keep-engine", "--text", "--eos-probability", "--trace", "--trace-steps"} | engine_flags()),
        (
            "serve",
            {"--url", "--api-key", "--label", "--concurrency", "--stream", "--reset-path", "--wait", "--timeout"},
        ),
    ):
        shown = re.findall(r"^  (--[a-z-]+)", help_of(bench, kind), re.MULTILINE)
        assert set(shown) == WORKLOAD_FLAGS | own
        assert len(shown) == len(set(shown))


def engine_flags() -> set[str]:
    switches = {"prefix_groups", "cuda_graphs"}
    return {("--no-" if name in switches else "--") + name.replace("_", "-") for name in ENGINE_FLAGS} - {
        "--generation-config"  # a workload sets all sampling parameters
    }


def help_of(parser: argparse.ArgumentParser, kind: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit):
        parser.parse_args(["bench", kind, "--help"])
    return printed.getvalue()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--workload", "monkeys"], "--workload-dir is None; allowed: a directory with monkeys.jsonl"),
        (["--workload", "{file}", "--reps", "0"], "--reps is 0; allowed: integers from 1"),
        (["--workload", "{file}", "--n", "0"], "--n is 0; allowed: integers from 1"),
        (["--workload", "{file}", "--temperature", "-1"], "--temperature is -1.0; allowed: numbers from 0"),
        (["--workload", "{file}", "--top-p", "0"], "--top-p is 0.0; allowed: above 0"),
        (["--workload", "{file}", "--plot", "/no/such/plot.png"], "--plot is '/no/such/plot.png'; allowed: a file in"),
        (["--workload", "{file}", "--trace", "/no/such/t.json"], "--trace is '/no/such/t.json'; allowed: a file in"),
        (["--workload", "{file}", "--trace-steps", "0"], "--trace-steps is 0; allowed: integers from 1"),
        (["--workload", "{file}", "--trace-steps", "5"], "--trace-steps is 5; allowed: only together with --trace"),
        (["--workload", "{file}", "--page-size", "3"], "--page-size is 3; allowed: powers of two"),
        (
            ["--workload", "{file}", "--eos-probability", "0.5"],
            "--eos-probability is 0.5; allowed: only if load_format is dummy",
        ),
        (
            ["--workload", "{file}", "--load-format", "dummy", "--eos-probability", "0.5", "--temperature", "0"],
            "--temperature is 0.0; allowed: above 0 with --eos-probability",
        ),
    ],
)
def test_bench_offline_reports_an_invalid_flag_value_in_one_line(
    given: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "w.jsonl").write_text(LINES)
    assert tok(["bench", "offline", *(word.format(file=file) for word in given)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"tok bench: error: {told}")
    assert error.count("\n") == 1


@pytest.mark.parametrize("kind", ["offline", "serve"])
def test_help_loads_no_torch_and_no_web_stack(kind: str) -> None:
    code = (
        "import sys\nfrom tok_server.cli import main\n"
        f"try: main(['bench', {kind!r}, '--help'])\nexcept SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'numpy', 'aiohttp', 'zmq', 'transformers', 'matplotlib', 'rich'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--workload" in done.stdout

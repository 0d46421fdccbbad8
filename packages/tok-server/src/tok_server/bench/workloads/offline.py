"""Run a workload through `Engine`: all requests are submitted at once, with token ids in and out."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import msgspec

from tok_core import Engine, EngineConfig, RequestOutput, SamplingParams
from tok_core.config import RankCoordinates
from tok_core.engine import Prompt
from tok_core.messages import EngineInfo
from tok_core.model_config import resolve
from tok_core.runtime import ScratchDirectory
from tok_server.bench.busy import DeviceTime, trace_device_time
from tok_server.bench.gpu import first_gpu
from tok_server.bench.tracing import run_traced, tracing
from tok_server.bench.watch import ShowProgress, call_periodically, progress_bar, throttled
from tok_server.bench.workloads.counters import Counters, counter_growth, with_counters
from tok_server.bench.workloads.result import Result, percentile, ratio
from tok_server.bench.workloads.timeline import timeline
from tok_server.bench.workloads.workload import Workload, WorkloadRequest, warm_up_requests

OBSERVE_SECONDS = 0.02  # between observations of the engine's counters
PROGRESS_SECONDS = 0.25  # between updates of the progress bar
WARM_UP_TOKENS = 16  # per sample
CAPTURE_SECONDS = 1.0  # in which an idle worker captures CUDA graphs, between looks at how many are missing
MAX_CAPTURE_SECONDS = 30.0  # maximum wait for all of them
SETTLE_SECONDS = 10.0  # maximum wait for the steps queued behind the last token
LINKED_FILES = ("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json")


def run_offline(
    config: EngineConfig, name: str, workload: Workload, *, reps: int, keep_engine: bool, text: bool
) -> Iterator[Result]:
    """Yield one result per repetition, each measured on a separate engine after a warm-up.

    name         name of the model
    keep_engine  use one engine for all repetitions; later ones find the earlier ones' tokens in the prefix cache
    text         detokenise the outputs, too

    Errors: those of the engine.
    """
    with _model_view(config, text) as config:
        for first in range(0, reps, reps if keep_engine else 1):
            yield from _on_one_engine(config, name, workload, range(first, reps if keep_engine else first + 1))


def trace_offline(
    config: EngineConfig, workload: Workload, file: Path, *, steps: int, total_steps: int, text: bool
) -> dict[RankCoordinates, DeviceTime]:
    """Trace `steps` steps in the middle of one more run, of about `total_steps` steps. Returns each worker's summary.

    The trace is written to `file`, and to files beside it for further workers (`tok_core.runtime.trace_file`). A
    separate engine runs it, so that no result includes the cost of tracing. Steps after the traced ones are not run.
    Errors: InvalidField if `steps` is too large; those of the engine.
    """
    with _model_view(tracing(config, file, steps, total_steps), text) as config:
        prompts, params = _requests(workload.requests, workload)
        files = run_traced(config, lambda engine: engine.generate(prompts, params))
    return {coordinates: trace_device_time(file) for coordinates, file in files.items()}


@contextmanager
def _model_view(config: EngineConfig, text: bool) -> Iterator[EngineConfig]:
    """Yield `config` with a model that has a tokenizer only if `text` is set."""
    view = nullcontext(config.model) if text else without_tokenizer(config.model, config.data_dir)
    with view as model:
        yield msgspec.structs.replace(config, model=model)


@contextmanager
def without_tokenizer(model: str, data_dir: str | None) -> Iterator[str]:
    """Yield a directory of links to the files of `model` (a directory or a hub id) without the tokenizer.

    The engine's warning about the missing tokenizer is not logged meanwhile. Errors: ModelError.
    """
    path = resolve(model, data_dir)
    log = logging.getLogger("tok_core")
    scratch = ScratchDirectory("bench")
    try:
        view = Path(scratch.name) / (path.resolve().name or "model")
        view.mkdir()
        for pattern in LINKED_FILES:
            for file in path.glob(pattern):
                (view / file.name).symlink_to(file.resolve())
        log.addFilter(_is_not_about_tokenizer)
        try:
            yield str(view)
        finally:
            log.removeFilter(_is_not_about_tokenizer)
    finally:
        scratch.cleanup()


def _is_not_about_tokenizer(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("token ids only")


def _on_one_engine(config: EngineConfig, name: str, workload: Workload, reps: range) -> Iterator[Result]:
    began = time.monotonic()
    with Engine(config) as engine:
        started = time.monotonic() - began
        warm_up(engine, workload)
        for rep in reps:
            result = measure(engine, name, workload, rep)
            yield msgspec.structs.replace(result, startup_s=round(started, 2), prefix_groups=config.prefix_groups)


def warm_up(engine: Engine, workload: Workload) -> None:
    """Generate a few tokens for as many sequences as can run at once, and let idle workers capture all CUDA graphs."""
    requests = warm_up_requests(workload.requests, engine.info.max_running, WARM_UP_TOKENS)
    engine.generate(*_requests(requests, workload))
    until = time.monotonic() + MAX_CAPTURE_SECONDS
    while engine.stats()["missing_graphs"] and time.monotonic() < until:
        time.sleep(CAPTURE_SECONDS)
        engine.generate([[0]], SamplingParams(max_tokens=1))


class _RunObserver:
    """Observations during a run: `observations` are the rows of `timeline`, `outputs` the finished requests."""

    def __init__(self, engine: Engine, show: ShowProgress) -> None:
        self.outputs: list[RequestOutput] = []
        self.observations: list[tuple[float, ...]] = []
        self.gpu = first_gpu() if engine.info.device.startswith("cuda") else None
        self.before = settled_counters(engine)
        self.began = time.monotonic()
        self._engine = engine
        self._show = show
        self._show_throttled = throttled(self.show_progress, PROGRESS_SECONDS)

    def observe(self) -> None:
        """Append a row of counters to `observations`. It must be cheap: the run shares this interpreter."""
        stats = self._engine.stats()
        growth = counter_growth(self.before, stats)
        worked = growth("device_seconds") / stats["replicas"]
        row = (growth("output_tokens"), stats["sequences_running"], worked, growth("computed_tokens"))
        self.observations.append((time.monotonic() - self.began, *row))
        self._show_throttled()

    def show_progress(self) -> None:
        """Update the progress bar and read the GPU's memory use."""
        _, tokens, running, *_ = self.observations[-1]
        self._show(len(self.outputs), int(tokens), int(running))
        if self.gpu is not None:
            self.gpu.sample()


def measure(engine: Engine, name: str, workload: Workload, rep: int) -> Result:
    """Run one repetition on an otherwise idle engine. Errors: those of the engine."""
    prompts, params = _requests(workload.requests, workload)
    with progress_bar(f"{workload.name} {rep}", len(prompts)) as show:
        observer = _RunObserver(engine, show)
        with call_periodically(observer.observe, OBSERVE_SECONDS):
            observer.outputs.extend(output for _, output in engine.stream(prompts, params))
            seconds = time.monotonic() - observer.began
        observer.show_progress()
    result = _result(engine.info, name, workload, rep, observer, seconds)
    return with_counters(result, observer.before, settled_counters(engine))


def settled_counters(engine: Engine) -> Counters:
    """Return the engine's counters once the steps queued behind the last token have returned."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while engine.stats()["steps_in_flight"] and time.monotonic() < deadline:
        time.sleep(0.005)
    return engine.stats()


def _requests(requests: list[WorkloadRequest], workload: Workload) -> tuple[list[Prompt], list[SamplingParams]]:
    """Return prompts and their sampling parameters."""
    params = [
        SamplingParams(
            n=request.n,
            max_tokens=request.max_tokens,
            temperature=workload.temperature,
            top_p=workload.top_p,
            ignore_eos=request.ignore_eos,
            seed=index,
        )
        for index, request in enumerate(requests)
    ]
    return [request.ids for request in requests], params


def _result(
    info: EngineInfo, name: str, workload: Workload, rep: int, observer: _RunObserver, seconds: float
) -> Result:
    outputs, gpu = observer.outputs, observer.gpu
    samples = [sample for output in outputs for sample in output.outputs]
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    output_tokens = sum(len(sample.token_ids) for sample in samples)
    ttft, latency, per_token = _times(outputs)
    return Result(
        engine="tok",
        mode="offline",
        workload=workload.name,
        rep=rep,
        prompts=len(outputs),
        sequences=len(samples),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        seconds=round(seconds, 3),
        output_tok_s=round(output_tokens / seconds, 1),
        total_tok_s=round((prompt_tokens + output_tokens) / seconds, 1),
        mean_out=round(ratio(output_tokens, len(samples)), 2),
        finished_by_stop=sum(sample.finish_reason == "stop" for sample in samples),
        errors=sum(sample.finish_reason == "abort" for sample in samples),
        gpu=None if gpu is None else gpu.name,
        peak_gpu_mem_gib=None if gpu is None else round(gpu.peak / 2**30, 2),
        latency_p50_s=percentile(latency, 0.5),
        latency_p99_s=percentile(latency, 0.99),
        concurrency=info.max_running,
        model=name,
        ttft_p50_s=percentile(ttft, 0.5),
        ttft_p99_s=percentile(ttft, 0.99),
        per_token_p50_ms=percentile(per_token, 0.5, 1e3),
        per_token_p99_ms=percentile(per_token, 0.99, 1e3),
        prefix_hit_share=round(ratio(sum(output.cached_tokens for output in outputs), prompt_tokens), 4),
        device=info.device,
        dtype=info.dtype,
        linear_layers=info.linear_layers,
        backend=info.backend,
        kv_cache_tokens=info.kv_cache_tokens,
        max_step_tokens=info.max_step_tokens,
        tp_few_tokens=info.max_all_reduce_tokens,
        tp_async_tokens=info.min_overlap_tokens,
        tail_tok_s=tail_speed(observer.observations, len(samples)),
        timeline=timeline(observer.observations, seconds),
    )


def tail_speed(observations: Sequence[tuple[float, ...]], samples: int) -> float | None:
    """Return output tokens per second from when a quarter of the samples is left until the end; None without a tail.

    >>> tail_speed([(0.0, 0, 4), (1.0, 40, 1), (2.0, 50, 1), (3.0, 60, 0)], samples=4)
    10.0
    """
    last = max((row for row, (_, _, running, *_) in enumerate(observations) if running > samples / 4), default=-1)
    (began, before, *_), (ended, after, *_) = observations[min(last + 1, len(observations) - 1)], observations[-1]
    return round((after - before) / (ended - began), 1) if ended > began else None


def _times(outputs: list[RequestOutput]) -> tuple[list[float], list[float], list[float]]:
    """Return lists of seconds, over the requests: time to first token, latency, and per token of the longest sample."""
    ttft, latency, per_token = [], [], []
    for output in outputs:
        times = output.timings
        assert times.first_token is not None
        assert times.finished is not None
        ttft.append(times.first_token - times.submitted)
        latency.append(times.finished - times.submitted)
        longest = max(len(sample.token_ids) for sample in output.outputs)
        if longest > 1:
            per_token.append((times.finished - times.first_token) / (longest - 1))
    return ttft, latency, per_token

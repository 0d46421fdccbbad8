"""Tracer: a few of the worker's steps as a trace in Chrome's format, kernel by kernel."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from tok_core.config import TRACE_WARM_UP, EngineConfig
from tok_core.errors import InvalidField
from tok_core.mesh import RankCoordinates
from tok_core.runtime import trace_files


class Tracer:
    """Traces the steps from `first` on, `steps` of them, into `file`.

    On a GPU what runs there and the calls that launched it, on a CPU the operators. The file appears, whole, once the
    traced steps have been carried out; the step after them waits for that. Raises InvalidField for a file without a
    directory.
    """

    def __init__(self, file: Path, first: int, steps: int, device: torch.device) -> None:
        if not file.parent.is_dir():
            raise InvalidField("trace", str(file), "a file in a directory that exists")
        import_module("torch._inductor.config")  # the profiler looks into it: seconds, which no step is to wait for
        self._file = file
        self._first = first
        self._end = first + steps
        activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
        self._profile = profile(activities=[activity], acc_events=True)

    @classmethod
    def of(cls, config: EngineConfig, place: RankCoordinates, device: torch.device) -> Tracer | None:
        """The one of the first replica's worker at `place`, if traces are asked for. Errors: InvalidField.

        All workers are told of every step, so that they trace the same ones.
        """
        file = trace_files(config).get(place)
        return None if file is None else cls(file, config.trace_from, config.trace_steps, device)

    def before(self, step: int) -> None:
        """To be called before each step is launched, by the thread that launches it; `step` counts from 1."""
        if step == self._first - TRACE_WARM_UP:
            self._profile.prepare_trace()
        elif step == self._first:
            self._profile.start_trace()
        elif step == self._end:
            self._profile.stop_trace()
            self._write()

    def _write(self) -> None:
        unfinished = self._file.with_name(f"{self._file.name}.unfinished")
        self._profile.export_chrome_trace(str(unfinished))
        unfinished.replace(self._file)

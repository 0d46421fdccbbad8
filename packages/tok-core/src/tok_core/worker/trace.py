"""Trace a few of the worker's steps with PyTorch's profiler, and write a file in Chrome's trace format."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from tok_core.config import TRACE_WARM_UP, EngineConfig, RankCoordinates
from tok_core.errors import InvalidField
from tok_core.runtime import trace_files


class Tracer:
    """Tracer of `steps` steps, from step number `first` on, into `file`.

    On a GPU the trace has the kernels and the calls that launched them; on a CPU it has the operators. The file is
    written before the first step that is not traced any more, and renamed when complete. Raises InvalidField if the
    file's directory is missing.
    """

    def __init__(self, file: Path, first: int, steps: int, device: torch.device) -> None:
        if not file.parent.is_dir():
            raise InvalidField("trace", str(file), "a file in a directory that exists")
        import_module("torch._inductor.config")  # takes seconds: import it now, so that no step waits
        self._file = file
        self._first = first
        self._end = first + steps
        activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
        self._profile = profile(activities=[activity], acc_events=True)

    @classmethod
    def of(cls, config: EngineConfig, coordinates: RankCoordinates, device: torch.device) -> Tracer | None:
        """Return the tracer of the first replica's worker at `coordinates`; None if that worker does not trace.

        All workers receive every step, so that they trace the same steps. Raises InvalidField, as the class does.
        """
        file = trace_files(config).get(coordinates)
        return None if file is None else cls(file, config.trace_from, config.trace_steps, device)

    def before(self, step: int) -> None:
        """Start or stop tracing, if step number `step` is the first or the last; steps count from 1.

        The thread that launches steps calls this before each of them.
        """
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
